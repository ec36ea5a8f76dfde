"""Loops: each file is one way to train, with `run(experiment, mesh, log)`."""

"""Sweeps: many runs of one config on a pool of pods (`-m`).

One run is `controller/run/`, jobs of other Hydra apps are `controller/multirun/`. Imports runs.
"""

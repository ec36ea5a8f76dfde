"""Sweeps: many runs of one config on a pool of pods (`-m`)."""

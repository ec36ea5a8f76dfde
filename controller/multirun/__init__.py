"""Jobs of other people's Hydra apps, for the launcher in `controller/installed`: each is a run on a pool of pods.

Slipway's own `-m` is `controller/sweep/`. Imports sweeps; `job.py`, which runs on a worker, the standard library.
"""

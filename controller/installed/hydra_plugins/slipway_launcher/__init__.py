"""Hydra finds its launcher here by the name of the folder.

It runs in the user's app, so the work is done in another process, `controller/multirun/`. Imports Hydra and nothing of
Slipway.
"""

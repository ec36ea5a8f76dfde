"""Losses and their metrics, as functions of weights and a batch.

The update around them is `trainer/step/`. Imports models, and the sums of `trainer/step/`.
"""

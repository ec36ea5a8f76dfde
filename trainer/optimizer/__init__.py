"""The optimizer as one optax chain: which direction each weight takes, how far, and when.

The gradients come from `trainer/step/`. Imports the table of weights.
"""

"""Checkpoints: written, kept, restored, and held back while a bucket does not answer.

Weights of other formats are in `trainer/pretrained/`. Imports Orbax and what is below it, no loop.
"""

"""Sudokus and mazes: rules, symmetries, files and batches.

The model that solves them is `trainer/models/trm.py`. Imports corpus, no JAX.
"""

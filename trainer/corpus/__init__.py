"""Data sets in files: globs, byte ranges of text and JSON lines, row groups of Parquet.

Tokens and batches are made in `trainer/data/`. Imports fsspec and pyarrow, no JAX.
"""

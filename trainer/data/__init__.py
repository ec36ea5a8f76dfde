"""Training data: a batch is a function of (seed, step), or of a position stored in a checkpoint.

Files are read in `trainer/corpus/`, puzzles have `trainer/puzzles/`. Imports tokenizer and corpus, no model.
"""

"""Training data: a batch is a function of (seed, step), or of a position stored in a checkpoint."""

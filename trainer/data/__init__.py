"""What the loops train on: a batch is a function of (seed, step), or of a position that a checkpoint holds."""

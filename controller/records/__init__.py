"""What made a run and what came of it, kept so that each number leads back to its config and code."""

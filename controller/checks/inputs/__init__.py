"""Checks of what a run reads: data, weights, tokenizers and downloads."""

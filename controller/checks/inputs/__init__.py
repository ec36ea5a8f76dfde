"""Checks of what a run reads: data, weights, tokenizers, downloads, and modules of the user's own."""

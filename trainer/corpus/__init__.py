"""Data sets in files: globs, byte ranges of text and JSON lines, row groups of Parquet."""

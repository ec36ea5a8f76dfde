"""Data sets as files: globs, byte ranges of text and JSON lines, row groups of Parquet."""

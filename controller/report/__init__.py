"""HTML page about runs: curves, tables of results, times and costs, and transcripts (docs/report.md)."""

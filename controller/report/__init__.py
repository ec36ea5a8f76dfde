"""HTML page about runs: curves, ablation table, timelines and transcripts (docs/report.md)."""

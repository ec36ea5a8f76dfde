"""One HTML page about runs: curves, the ablation table, where the time went, what was answered. docs/report.md"""

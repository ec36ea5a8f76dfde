"""HTML page about runs: curves, tables of results, times and costs, and transcripts (docs/report.md).

Which runs a page is about is up to the verb. Imports records, and requests nothing but their files.
"""

"""Checks between sections of the config, one file per theme; each is a small pure function whose docstring says why."""

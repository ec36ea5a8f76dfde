"""Checks between sections of the config, one file per topic. Each check's docstring gives its reason."""

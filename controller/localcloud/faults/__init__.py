"""Faults that `cloud.faults` plants: their schema, when they strike, what they do.

Delays that are normal are in `localcloud/delays.py`. Imports the emulated services.
"""

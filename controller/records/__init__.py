"""Records of runs: inputs and results, kept so that every number can be traced back to its config and code.

Nothing is decided here: who may write is up to `controller/lease.py`, what is written when to `controller/run/`.
Imports the plan and its resources, and no run.
"""

"""Rewards: functions of a response and the correct answer, computed in limited processes.

Environments of several turns are in `trainer/environments/`. Imports no JAX.
"""

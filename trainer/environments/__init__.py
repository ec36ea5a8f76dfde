"""Environments that answer a policy turn by turn, built in or of the library verifiers, in worker processes.

Rewards of single responses are in `trainer/rewards/`. Imports sampler, data and sandbox.
"""

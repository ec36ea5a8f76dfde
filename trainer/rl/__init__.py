"""The parts of a GRPO run: rollouts, programs, state, telemetry.

The algorithm is read in `trainer/loops/grpo.py`. Imports everything below the loops.
"""

"""Evaluations during and after training: accuracy, CORE, lm-evaluation-harness, programs, puzzles.

When they run is set by `loop.evaluations`, what a run logs by `trainer/telemetry/`. Imports models, sampler, data and
rewards.
"""

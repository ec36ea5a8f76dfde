"""Pods of samplers: they are driven beside the trainer's run, and end with it."""

"""Rehearsals: a plan scaled down, on an emulated cloud of its own, with a preemption.

The emulated cloud is `controller/localcloud/`, which is reached over HTTP only. Imports runs.
"""

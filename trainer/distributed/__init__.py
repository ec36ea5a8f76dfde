"""Processes and devices: mesh, agreement before the first step, checksums, notices of preemption.

What is computed on the mesh is not known here. Imports JAX and `conf`.
"""

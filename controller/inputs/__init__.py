"""What a run brings: code, packages, data, weights, secrets and modules of its own, read on this machine and judged.

Sending them is up to `controller/resources/uploads/`. Imports `controller/config/`, and no SSH.
"""

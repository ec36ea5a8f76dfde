"""First contacts with the real Google: played, recorded without names, and replayed to the emulated cloud.

What it finds is mended in `controller/localcloud/`. Imports runs and cleanup.
"""

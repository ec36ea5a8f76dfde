"""Slipway as it is installed: `from slipway import api`, `python -m slipway`, and the command `slipway`.

Its packages `conf`, `controller` and `trainer` are not on `sys.path`; `slipway.finder` finds them.
"""

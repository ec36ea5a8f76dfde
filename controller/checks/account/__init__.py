"""Checks that ask Google who you are and what you and your project may do.

Checks that need no cloud are one folder up. Imports what `controller/checks/` may.
"""

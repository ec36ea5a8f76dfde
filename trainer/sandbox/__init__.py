"""Boxes: processes with limits that see nothing else of the machine.

What runs in one is up to environments and evaluations. Imports the standard library only.
"""

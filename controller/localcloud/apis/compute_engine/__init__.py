"""Emulated VMs with TPUs: instances, groups of them, and the slices that they become.

Compute's other collections are one folder up. Imports the same as that folder.
"""

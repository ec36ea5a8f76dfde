"""Emulated VMs: an SSH server, a home folder and processes each.

When one exists is decided by `localcloud/apis/`. Imports the emulator's store and settings, and asyncssh.
"""

"""The emulated services of Google, by resource: what a method checks, does and answers.

Routes, required fields and types come from the discovery documents (`localcloud/http/`). Imports the emulator's store,
clock and identities.
"""

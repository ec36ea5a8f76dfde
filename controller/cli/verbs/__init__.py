"""The verbs, by subject: each reads its flags, calls the library and prints.

A flag is declared in `cli/flags.py`. Imports all of the controller.
"""

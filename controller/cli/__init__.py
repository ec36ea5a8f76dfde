"""The command line: words, flags, help, completion and what a terminal shows.

What the verbs do is below, in folders that `controller.api` uses too. Imports all of the controller; nothing imports
it.
"""

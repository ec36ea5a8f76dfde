"""Rollouts that other processes draw: the connection, who is let in, what is leased, and the journal.

What is drawn is up to the folder above. Imports the same as that.
"""

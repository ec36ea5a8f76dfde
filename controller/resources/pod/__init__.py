"""The pod: one slice, from either of Google's APIs, in the first place that has capacity.

What is set up on its workers is one folder up. Imports the same as that folder.
"""

"""A folder that a program's PYTHONPATH begins with: Python imports `sitecustomize` from it before the program.

Nothing else belongs here, since its names hide those of the program. Imports the standard library only.
"""

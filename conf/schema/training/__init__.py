"""The half of the schema that the trainer reads too: data, model, loop, optimizer, mesh, checkpoints.

What only the controller needs is one folder up. Imports that folder's base classes and facts of topologies.
"""

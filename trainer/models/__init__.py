"""Models: a table of weights each, and plain functions that compute with them.

Files of weights are read in `trainer/pretrained/`, sizes are in `conf/model/`. Imports the mesh.
"""

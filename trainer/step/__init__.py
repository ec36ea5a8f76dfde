"""One update: gradients over the mesh, the optimizer's step, and what is checked around it.

Losses are passed in. Imports optimizer and models.
"""

"""Batch types: arrays by field name, whose first axis is the row."""

import jax
import numpy as np

Batch = dict[str, np.ndarray]
"""A batch on the host: the rows of one process, or all rows."""

DeviceBatch = dict[str, jax.Array]
"""A batch on the devices: global arrays, sharded by rows over the mesh."""

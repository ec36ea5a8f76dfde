"""What a batch is: arrays by field name, whose first axis is the row."""

from __future__ import annotations

import jax
import numpy as np

Batch = dict[str, np.ndarray]
"""On the host: the rows of one process, or all rows."""

DeviceBatch = dict[str, jax.Array]
"""On the devices: global arrays, split by rows over the mesh."""

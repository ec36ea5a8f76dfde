"""Weights of MXFP4: blocks of 32 four-bit floats (e2m1), each block with a power of two.

OCP Microscaling Formats 1.0, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from functools import cache

import jax.numpy as jnp
import numpy as np

PARTS = ("_blocks", "_scales")
"""Ends of the names of the two tensors that are one weight."""
BLOCK_BYTES = 16
FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the lower three of four bits; the highest is the sign."""


@cache
def _pairs() -> np.ndarray:
    """Return the two bfloat16 of each scale and byte, as uint32 [scale * 256 + byte]; a byte's low bits are first."""
    floats = np.array([*FLOATS, *(-x for x in FLOATS)], np.float32)
    pairs = np.stack([np.tile(floats, 16), np.repeat(floats, 16)], axis=1)
    powers = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))  # the last is no number
    with np.errstate(over="ignore"):
        return (powers[:, None, None] * pairs).astype(jnp.bfloat16).view(np.uint32).reshape(-1)


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return bfloat16 [experts, inputs, outputs], which holds each value exactly.

    blocks: uint8 [experts, outputs, inputs / 32, 16]; scales: uint8 without the last axis. Raises ValueError.
    """
    if blocks.shape != (*scales.shape, BLOCK_BYTES) or blocks.ndim != 4 or not blocks.dtype == scales.dtype == np.uint8:
        raise ValueError(
            f"blocks {blocks.dtype} {blocks.shape} and scales {scales.dtype} {scales.shape} are not of MXFP4"
        )
    experts, outputs, groups, _ = blocks.shape
    found = np.empty((experts, groups * 2 * BLOCK_BYTES, outputs), jnp.bfloat16)
    for expert, block, scale in zip(found, blocks, scales, strict=True):  # the pairs of one at a time
        places = scale.astype(np.uint16)[..., None] << 8 | block
        expert[:] = _pairs()[places].view(jnp.bfloat16).reshape(outputs, -1).T
    return found

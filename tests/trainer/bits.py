"""Flips bits in the memory of arrays and batches, as bad hardware does: nobody is told."""

import ctypes

import jax
import numpy as np


def memory_of(array: jax.Array, shard: int = 0) -> np.ndarray:
    """The bytes of one of this process's shards, as they lie in memory; only on CPU devices."""
    data = jax.block_until_ready(array.addressable_shards[shard].data)
    where = (ctypes.c_uint8 * data.nbytes).from_address(data.unsafe_buffer_pointer())
    return np.frombuffer(where, np.uint8)


def flip_bit(array: jax.Array, bit: int, element: int = 0, shard: int = 0) -> None:
    """Flip a bit of an element of a shard, where it is."""
    at = element * array.dtype.itemsize + bit // 8
    memory_of(array, shard)[at] ^= np.uint8(1 << bit % 8)


def set_nan(array: jax.Array, element: int = 0, shard: int = 0) -> None:
    """Make an element of a float32 shard NaN, where it is."""
    memory_of(array, shard).view(np.float32)[element] = np.nan

"""Flips bits in the memory of arrays and batches, as bad hardware does: nobody is told."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np


def in_own_memory(array: jax.Array) -> jax.Array:
    """The same array with memory of its own for each shard.

    `jax.device_put` gives all copies on CPU devices the memory of a NumPy array, if that happens to start at a
    multiple of 64 bytes.
    """
    shards = [jnp.array(shard.data, copy=True) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def memory_of(array: jax.Array, shard: int = 0) -> np.ndarray:
    """The bytes of one of this process's shards, as they lie in memory; only on CPU devices."""
    data = jax.block_until_ready(array.addressable_shards[shard].data)
    owners = [one.data.unsafe_buffer_pointer() for one in array.addressable_shards]
    assert owners.count(data.unsafe_buffer_pointer()) == 1, "copies share their memory: use in_own_memory"
    where = (ctypes.c_uint8 * data.nbytes).from_address(data.unsafe_buffer_pointer())
    return np.frombuffer(where, np.uint8)


def flip_bit(array: jax.Array, bit: int, element: int = 0, shard: int = 0) -> None:
    """Flip a bit of an element of a shard, where it is."""
    at = element * array.dtype.itemsize + bit // 8
    memory_of(array, shard)[at] ^= np.uint8(1 << bit % 8)


def set_nan(array: jax.Array, element: int = 0, shard: int = 0) -> None:
    """Make an element of a float32 shard NaN, where it is."""
    memory_of(array, shard).view(np.float32)[element] = np.nan

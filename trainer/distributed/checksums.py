"""Checksums of arrays on a mesh: independent of the sharding, and compared between replicas of a shard.

The checksum of an array is the sum of its elements' bit patterns, modulo 2^32. Sums of shards add up to that of the
whole, so the sharding does not matter; one flipped bit always changes the sum.
"""

from collections import Counter, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

UNSIGNED_BY_SIZE = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
MAX_NAMES_SHOWN = 3


class DisagreementError(RuntimeError):
    """Workers differ in a value that must be equal on all; the message names those that differ."""


class ReplicaChecksums:
    """Computes checksums with one program per set of shapes and shardings, reading every array once."""

    def __init__(self) -> None:
        self._programs: dict[Any, Any] = {}

    def compute(self, tree: Any, when: str) -> dict[str, int]:
        """Return the checksum of every array, by its path. All processes must call it, and all get the same.

        tree: of jax.Array with NamedSharding, all on one mesh. when: phrase for the message, e.g. "after update 30".
        Raises DisagreementError on all processes if replicas of a shard differ.
        """
        named = {leaf_path(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        leaves = list(named.values())
        shardings = tuple(leaf.sharding for leaf in leaves)
        if shardings not in self._programs:
            self._programs[shardings] = _program(shardings)
        with jax.transfer_guard("allow"):
            table = np.asarray(self._programs[shardings](leaves).addressable_data(0))
        sums: dict[str, int] = {}
        odd: dict[int, list[str]] = defaultdict(list)
        for (name, leaf), column in zip(named.items(), table.T, strict=True):
            parts = _replica_rows(leaf.sharding, leaf.shape)
            sums[name] = sum(int(column[rows[0]]) for rows in parts) % 2**32
            for worker in sorted(
                {worker for rows in parts for worker in _disagreeing_workers(leaf.sharding, rows, column)}
            ):
                odd[worker].append(name)
        if odd:
            raise DisagreementError(
                "\n".join(_parse_message(worker, names, when) for worker, names in sorted(odd.items()))
            )
        return sums


def leaf_path(path: Any) -> str:
    """Return a leaf's dotted path, e.g. params.layers.down."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def bit_sum(array: np.ndarray) -> int:
    """Return the checksum of an array on the host, as `ReplicaChecksums` computes it on devices."""
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}[array.dtype.itemsize]
    return int(np.ascontiguousarray(array).reshape(-1).view(unsigned).sum(dtype=np.uint64)) % 2**32


def _program(shardings: tuple[NamedSharding, ...]) -> Any:
    """Return the jitted function from arrays to a replicated table of sums [devices in mesh order, arrays]."""
    mesh = shardings[0].mesh

    def sums(leaves: list[jax.Array]) -> jax.Array:
        own = jnp.stack([_bit_sum(leaf) for leaf in leaves])
        return lax.all_gather(own, mesh.axis_names)

    specs = [sharding.spec for sharding in shardings]
    return jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False))


def _bit_sum(part: jax.Array) -> jax.Array:
    bits = part.astype(jnp.uint8) if part.dtype == jnp.bool_ else part
    bits = lax.bitcast_convert_type(bits, UNSIGNED_BY_SIZE[min(bits.dtype.itemsize, 4)])
    return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)


def _replica_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> list[list[int]]:
    """Return, for each distinct shard, the table rows (devices) that hold a replica of it."""
    row_of = {device: row for row, device in enumerate(_devices(sharding))}
    parts: dict[Any, list[int]] = defaultdict(list)
    for device, index in sharding.devices_indices_map(shape).items():
        parts[tuple((part.start, part.stop) for part in index)].append(row_of[device])
    return [sorted(rows) for rows in parts.values()]


def _disagreeing_workers(sharding: NamedSharding, rows: list[int], column: np.ndarray) -> set[int]:
    """Return the processes whose replica is not the most common one; in a tie the first device is right."""
    usual = Counter(int(column[row]) for row in rows).most_common(1)[0][0]
    devices = _devices(sharding)
    return {devices[row].process_index for row in rows if column[row] != usual}


def _devices(sharding: NamedSharding) -> list[Any]:
    devices = sharding.mesh.devices
    assert devices is not None, "a mesh of real devices"
    return list(devices.flat)


def _parse_message(worker: int, names: list[str], when: str) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    listed = ", ".join(names[:MAX_NAMES_SHOWN])
    return f"worker {worker}: its copy of {listed}{more} differs from the other workers' {when}"

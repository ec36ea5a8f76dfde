"""Checksums of arrays on a mesh: independent of the sharding, and compared between replicas of a shard.

The checksum of an array is the sum of its elements' bit patterns, modulo 2^32. Sums of shards add up to that of the
whole, so the sharding does not matter; one flipped bit always changes the sum.

Two comparisons find silent corruption of the state: of the copies of a shard on several devices, and of a shard with
itself between two checks of the same arrays. Only the second one sees a shard that has no copy.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType, ref

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

UNSIGNED_BY_SIZE = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
MAX_NAMES_SHOWN = 3


class DisagreementError(RuntimeError):
    """Workers differ in a value that must be equal on all; the message names those that differ."""


class CorruptionError(RuntimeError):
    """Hardware has changed bits on a worker; every line of the message begins with `MARK` and names the worker."""

    MARK = "hardware fault: "
    """Begins the lines from which the controller reads which worker it was."""

    def __init__(self, lines: Sequence[str]) -> None:
        """Take lines such as `worker 1: its copy of params.embedding differs`."""
        super().__init__("\n".join(f"{self.MARK}{line}" for line in lines))


class ReplicaChecksums:
    """Computes checksums with one program per set of shapes and shardings, reading every array once."""

    def __init__(self) -> None:
        self._programs: dict[Any, Any] = {}
        self._last: tuple[list[ReferenceType[jax.Array]], np.ndarray] = ([], np.zeros(0))

    def compute(self, tree: Any, when: str) -> dict[str, int]:
        """Return the checksum of every array, by its path. All processes must call it, and all get the same.

        tree: of jax.Array with NamedSharding, all on one mesh. when: phrase for the message, e.g. "after update 30".
        Raises CorruptionError on all processes if replicas of a shard differ, or if these are the arrays of the last
        call and their memory has changed since.
        """
        named = named_leaves(tree)
        leaves = list(named.values())
        shardings = tuple(leaf.sharding for leaf in leaves)
        if shardings not in self._programs:
            self._programs[shardings] = _program(shardings)
        with jax.transfer_guard("allow"):
            table = np.asarray(self._programs[shardings](leaves).addressable_data(0))
        self._compare_with_last(named, shardings[0], table, when)
        sums: dict[str, int] = {}
        odd: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for (name, leaf), column in zip(named.items(), table.T, strict=True):
            parts = _replica_rows(leaf.sharding, leaf.shape)
            sums[name] = sum(int(column[rows[0]]) for rows in parts) % 2**32
            for workers in sorted({found for rows in parts for found in _suspects(leaf.sharding, rows, column)}):
                odd[workers].append(name)
        if odd:
            raise CorruptionError([_replica_message(workers, names, when) for workers, names in sorted(odd.items())])
        return sums

    def _compare_with_last(
        self, named: dict[str, jax.Array], sharding: NamedSharding, table: np.ndarray, when: str
    ) -> None:
        """Raise CorruptionError if the arrays are those of the last table and a device's sums are others now."""
        (last, before), self._last = self._last, ([ref(leaf) for leaf in named.values()], table)
        if len(last) != len(named) or any(old() is not new for old, new in zip(last, named.values(), strict=True)):
            return
        names, devices = list(named), _devices(sharding)
        changed: dict[int, list[str]] = defaultdict(list)
        for row, column in np.argwhere(table != before):
            worker = devices[row].process_index
            if names[column] not in changed[worker]:
                changed[worker].append(names[column])
        if changed:
            lines = [f"worker {worker}: {_listed(found)} changed at rest {when}" for worker, found in changed.items()]
            raise CorruptionError(sorted(lines))


def leaf_path(path: Any) -> str:
    """Return a leaf's dotted path, e.g. params.layers.down."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their dotted paths."""
    return {leaf_path(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


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


def _suspects(sharding: NamedSharding, rows: list[int], column: np.ndarray) -> set[tuple[int, ...]]:
    """Return who may hold a wrong replica: each process outside the majority, or all where there is no majority."""
    devices = _devices(sharding)
    (usual, votes), *others = Counter(int(column[row]) for row in rows).most_common()
    if not others:
        return set()
    if others[0][1] == votes:
        return {tuple(sorted({devices[row].process_index for row in rows}))}
    return {(devices[row].process_index,) for row in rows if column[row] != usual}


def _devices(sharding: NamedSharding) -> list[Any]:
    devices = sharding.mesh.devices
    assert devices is not None, "a mesh of real devices"
    return list(devices.flat)


def _replica_message(workers: tuple[int, ...], names: list[str], when: str) -> str:
    if len(workers) == 1:
        return f"worker {workers[0]}: its copy of {_listed(names)} differs from the other workers' {when}"
    who = " or ".join(map(str, workers))
    return f"worker {who}: their copies of {_listed(names)} differ {when}, and no majority tells which one is wrong"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return f"{', '.join(names[:MAX_NAMES_SHOWN])}{more}"

"""The device mesh, the single table that maps logical axes to mesh axes, and the rows of a batch on the devices.

Rows are assigned in process order, not in the mesh's order, which may be optimized for the network. Each process
therefore reads one contiguous range of rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import conf.schema.training.settings
from conf.formats import RunFileError
from conf.schema.base import UnevenError
from conf.schema.training.loop import GrpoLoop, LmLoop
from conf.schema.training.loop_parts import PuzzleLoop

Batch = dict[str, np.ndarray]
"""A batch on the host: the rows of one process, or all rows."""

DeviceBatch = dict[str, jax.Array]
"""A batch on the devices: global arrays, sharded by rows over the mesh."""


MESH_AXES = ("data", "fsdp", "tensor", "expert")

LOGICAL_AXIS_RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp", "expert"),
    "rows": "data",  # batch rows, where fsdp splits another axis of the same array
    "embed": ("fsdp", "expert"),  # all that split the batch, but for copies: the least memory
    "heads": "tensor",
    "kv_heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
    "logits": ("fsdp", "tensor", "expert"),  # the vocabulary of computed logits
    "layers": None,
    "experts": "expert",
    "head_dim": None,
}


def axis_sizes(cfg: conf.schema.training.settings.Mesh, devices: int) -> dict[str, int]:
    """Return the axis sizes for that many devices, with -1 resolved. Raises RunFileError."""
    sizes = cfg.sizes
    given = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and devices % given == 0:
        sizes = {axis: devices // given if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != devices:
        shape = _described(sizes)
        raise RunFileError(f"mesh: {shape} does not make {devices} devices; change mesh.data, mesh.fsdp or mesh.tensor")
    return sizes


def build_mesh(cfg: conf.schema.training.settings.Mesh, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the mesh over devices in the order that suits their network; None: all devices of all processes.

    Raises RunFileError if its product is not their number, or their network has no such order.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(cfg, len(devices))
    types = (AxisType.Auto,) * len(MESH_AXES)
    try:
        return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # most TPUs split no axis of their network
        raise RunFileError(
            f"mesh: {_described(sizes)} cannot be laid along the axes of this slice's network; change mesh.data, "
            "mesh.fsdp or mesh.tensor to products of their sizes"
        ) from None


def _described(sizes: dict[str, int]) -> str:
    return conf.schema.training.settings.Mesh.shape(sizes, "{} {}")


def partition_spec(*axes: str | None) -> PartitionSpec:
    """Return the partition of an array with these logical axes; None means not split.

    An axis of the mesh splits the first one of them that it can: of weights of experts these, not `embed` too.
    """
    names = [_mesh_axes(axis) for axis in axes]
    taken = [set().union(*names[:i]) for i in range(len(names))]
    left = [[name for name in own if name not in before] for own, before in zip(names, taken, strict=True)]
    return PartitionSpec(*(None if not own else own[0] if len(own) == 1 else tuple(own) for own in left))


def named_sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Return `partition_spec` on a mesh."""
    return NamedSharding(mesh, partition_spec(*axes))


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Return a tree of abstract arrays with these shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def context_mesh() -> AbstractMesh | None:
    """Return the mesh in context; None without one, and where each device has its own part."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.manual_axes else mesh


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain the sharding of x; a no-op without a `context_mesh`."""
    return x if context_mesh() is None else jax.lax.with_sharding_constraint(x, partition_spec(*axes))


def over_devices(x: jax.Array) -> jax.Array:
    """Return the sum of what the devices have, where each computes its own part; elsewhere x, which is of all."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return jax.lax.psum(x, axes) if axes else x


def padding(axis: str, size: int) -> int:
    """Return how many entries an axis of this size lacks for the mesh in context, if any, to split it evenly."""
    mesh = context_mesh()
    return 0 if mesh is None else -size % num_shards(mesh, axis)


def is_data_parallel(mesh: Mesh) -> bool:
    """Return whether every device holds all weights."""
    return all(size == 1 for axis, size in mesh.shape.items() if axis != "data")


def num_shards(mesh: Mesh | AbstractMesh, axis: str) -> int:
    """Return the number of parts that a logical axis is split into."""
    return math.prod(mesh.shape[name] for name in _mesh_axes(axis))


def names_of(mesh: Mesh, axis: str) -> str:
    """Return the axes that split a logical axis, as text."""
    return " x mesh.".join(name for name in _mesh_axes(axis) if mesh.shape[name] > 1)


def _mesh_axes(axis: str | None) -> tuple[str, ...]:
    rule = None if axis is None else LOGICAL_AXIS_RULES[axis]
    return (rule,) if isinstance(rule, str) else rule or ()


def rows_per_device(batch: int) -> int:
    """Return how many of `batch` rows each device holds inside a computation; at least 1."""
    mesh = context_mesh()
    return batch if mesh is None else max(1, batch // num_shards(mesh, "batch"))


@dataclass(frozen=True)
class BatchSharding:
    """Sharding of global batches.

    Attributes:
        mesh: the mesh to shard over.
        accumulation: parts that an update computes sequentially.
        micro_batch_rows: rows that a device computes at a time.
        num_devices: with different rows, over all processes.
        row_block_of_device: block of rows, from 0, by device (jax.Device) of this process.
        rows: rows of the global batch that this process holds.
    """

    mesh: Mesh
    accumulation: int
    micro_batch_rows: int
    num_devices: int
    row_block_of_device: dict[Any, int]
    rows: range

    @property
    def sharding(self) -> NamedSharding:
        """Return the sharding of an array [B, ...], or [A, B / A, ...] with accumulation A above 1."""
        return named_sharding(self.mesh, *(("batch",) if self.accumulation == 1 else (None, "batch")))

    def shape(self, sequence: int) -> tuple[int, ...]:
        at_a_time = self.micro_batch_rows * self.num_devices
        return (at_a_time, sequence) if self.accumulation == 1 else (self.accumulation, at_a_time, sequence)

    def to_devices(self, batch: Batch) -> DeviceBatch:
        """Place this process's rows, [rows, T] each, on its devices as part of the global arrays."""
        size, sharding = self.micro_batch_rows * self.accumulation, self.sharding
        starts = [block * size - self.rows.start for block in self.row_block_of_device.values()]

        def put(values: np.ndarray) -> jax.Array:
            parts = [values[start : start + size] for start in starts]
            if self.accumulation > 1:
                parts = [part.reshape(self.accumulation, self.micro_batch_rows, -1) for part in parts]
            parts = jax.device_put(parts, list(self.row_block_of_device))
            return jax.make_array_from_single_device_arrays(self.shape(values.shape[1]), sharding, parts)

        return {name: put(values) for name, values in batch.items()}


def check_accumulation(loop: LmLoop | GrpoLoop | PuzzleLoop, mesh: Mesh) -> int:
    """Return the parts that an update computes sequentially. Raises RunFileError if they would be uneven."""
    try:
        return loop.accumulation(num_shards(mesh, "batch"))
    except UnevenError as error:
        raise RunFileError(str(error)) from None


def shard_rows(loop: LmLoop, mesh: Mesh, process: int | None = None) -> BatchSharding:
    """Return the sharding of the loop's batches over a mesh, as a process sees it; None is this one.

    Raises RunFileError if it would be uneven.
    """
    parts, accumulation = num_shards(mesh, "batch"), check_accumulation(loop, mesh)
    assert mesh.devices is not None, "a mesh of real devices"
    by_part = np.moveaxis(mesh.devices, MESH_AXES.index("tensor"), -1)  # the only axis that does not split rows
    holders = list(by_part.reshape(parts, -1))  # devices of each part, in the order of the batch axes
    owners = [{device.process_index for device in part} for part in holders]
    in_order = sorted(range(parts), key=lambda part: (min(owners[part]), part))
    this = jax.process_index() if process is None else process
    own = {device: i for i, part in enumerate(in_order) for device in holders[part] if device.process_index == this}
    rows, blocks = loop.rows // parts, own.values() or (0,)
    held = range(min(blocks) * rows, (max(blocks) + 1) * rows)
    return BatchSharding(mesh, accumulation, rows // accumulation, parts, own, held)

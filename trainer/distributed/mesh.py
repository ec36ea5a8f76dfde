"""The device mesh, and the one table that says which mesh axis splits which logical axis."""

from __future__ import annotations

import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import conf.schema.training.settings
from conf.schema.training.run_yaml import RunFileError

MESH_AXES = ("data", "fsdp", "tensor")

LOGICAL_AXIS_RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "rows": "data",  # of the batch, where fsdp splits another axis of the same array
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
    "logits": ("fsdp", "tensor"),  # the vocabulary, once the output layer is computed
    "layers": None,
    "head_dim": None,
}


def axis_sizes(cfg: conf.schema.training.settings.Mesh, devices: int) -> dict[str, int]:
    """Sizes of the axes on that many devices, with -1 replaced by what is left. Raises RunFileError."""
    sizes = {axis: getattr(cfg, axis) for axis in MESH_AXES}
    given = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and devices % given == 0:
        sizes = {axis: devices // given if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != devices:
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise RunFileError(f"mesh: {shape} does not make {devices} devices; change mesh.data, mesh.fsdp or mesh.tensor")
    return sizes


def build_mesh(cfg: conf.schema.training.settings.Mesh) -> Mesh:
    """The mesh over all devices of all processes. Raises RunFileError where its product is not their number."""
    sizes = axis_sizes(cfg, jax.device_count())
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition_spec(*axes: str | None) -> PartitionSpec:
    """The partition of an array with these logical axes; None: not split."""
    return PartitionSpec(*(None if axis is None else LOGICAL_AXIS_RULES[axis] for axis in axes))


def named_sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """`spec` on a mesh."""
    return NamedSharding(mesh, partition_spec(*axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Ask the partitioner to split x so. A no-op without a mesh in context, and where each device has its own part."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(*axes))


def splits_evenly(axis: str, size: int) -> bool:
    """Can the mesh in context, if any, split an axis of this size as its rule says?"""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or bool(mesh.manual_axes) or size % num_shards(mesh, axis) == 0


def is_data_parallel(mesh: Mesh) -> bool:
    """Every device holds all weights."""
    return mesh.shape["fsdp"] == mesh.shape["tensor"] == 1


def num_shards(mesh: Mesh | AbstractMesh, axis: str) -> int:
    """Into how many parts a logical axis is split."""
    rule = LOGICAL_AXIS_RULES[axis]
    names = (rule,) if isinstance(rule, str) else rule or ()
    return math.prod(mesh.shape[name] for name in names)


def rows_per_device(batch: int) -> int:
    """How many rows of an array of `batch` rows each device has, inside a computation; at least 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return batch if mesh.empty or mesh.manual_axes else max(1, batch // num_shards(mesh, "batch"))

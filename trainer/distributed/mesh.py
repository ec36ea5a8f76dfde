"""The device mesh, and the single table that maps logical axes to mesh axes."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import conf.schema.training.settings
from conf.schema.training.run_yaml import RunFileError

MESH_AXES = ("data", "fsdp", "tensor")

LOGICAL_AXIS_RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "rows": "data",  # batch rows, where fsdp splits another axis of the same array
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
    "logits": ("fsdp", "tensor"),  # the vocabulary of computed logits
    "layers": None,
    "head_dim": None,
}


def axis_sizes(cfg: conf.schema.training.settings.Mesh, devices: int) -> dict[str, int]:
    """Return the axis sizes for that many devices, with -1 resolved. Raises RunFileError."""
    sizes = {axis: getattr(cfg, axis) for axis in MESH_AXES}
    given = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and devices % given == 0:
        sizes = {axis: devices // given if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != devices:
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise RunFileError(f"mesh: {shape} does not make {devices} devices; change mesh.data, mesh.fsdp or mesh.tensor")
    return sizes


def build_mesh(cfg: conf.schema.training.settings.Mesh) -> Mesh:
    """Return the mesh over all devices of all processes. Raises RunFileError if its product is not their number."""
    sizes = axis_sizes(cfg, jax.device_count())
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition_spec(*axes: str | None) -> PartitionSpec:
    """Return the partition of an array with these logical axes; None means not split."""
    return PartitionSpec(*(None if axis is None else LOGICAL_AXIS_RULES[axis] for axis in axes))


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


def padding(axis: str, size: int) -> int:
    """Return how many entries an axis of this size lacks for the mesh in context, if any, to split it evenly."""
    mesh = context_mesh()
    return 0 if mesh is None else -size % num_shards(mesh, axis)


def is_data_parallel(mesh: Mesh) -> bool:
    """Return whether every device holds all weights."""
    return mesh.shape["fsdp"] == mesh.shape["tensor"] == 1


def num_shards(mesh: Mesh | AbstractMesh, axis: str) -> int:
    """Return the number of parts that a logical axis is split into."""
    rule = LOGICAL_AXIS_RULES[axis]
    names = (rule,) if isinstance(rule, str) else rule or ()
    return math.prod(mesh.shape[name] for name in names)


def rows_per_device(batch: int) -> int:
    """Return how many of `batch` rows each device holds inside a computation; at least 1."""
    mesh = context_mesh()
    return batch if mesh is None else max(1, batch // num_shards(mesh, "batch"))

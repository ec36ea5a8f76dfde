"""The device mesh, and the one table that says which mesh axis splits which logical axis."""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import conf.training

AXES = ("data", "fsdp", "tensor")

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
    "layers": None,
    "head_dim": None,
}


class MeshError(ValueError):
    """The mesh does not go with the devices or with the model; the message names the config key."""


def resolve(cfg: conf.training.Mesh, devices: int) -> dict[str, int]:
    """Sizes of the axes on that many devices, with -1 replaced by what is left."""
    sizes = {axis: getattr(cfg, axis) for axis in AXES}
    given = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and devices % given == 0:
        sizes = {axis: devices // given if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != devices:
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise MeshError(f"mesh: {shape} does not make {devices} devices; change mesh.data, mesh.fsdp or mesh.tensor")
    return sizes


def build(cfg: conf.training.Mesh) -> Mesh:
    """The mesh over all devices of all processes."""
    sizes = resolve(cfg, jax.device_count())
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(*axes: str | None) -> PartitionSpec:
    """The partition of an array with these logical axes; None: not split."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def named(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """`spec` on a mesh."""
    return NamedSharding(mesh, spec(*axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Ask the partitioner to split x so. A no-op without a mesh in context, and where each device has its own part."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    return jax.lax.with_sharding_constraint(x, spec(*axes))


def is_data_parallel(mesh: Mesh) -> bool:
    """Every device holds all weights."""
    return mesh.shape["fsdp"] == mesh.shape["tensor"] == 1


def shards(mesh: Mesh, axis: str) -> int:
    """Into how many parts a logical axis is split."""
    rule = RULES[axis]
    names = (rule,) if isinstance(rule, str) else rule or ()
    return math.prod(mesh.shape[name] for name in names)

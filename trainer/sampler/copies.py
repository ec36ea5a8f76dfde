"""The sampler's copy of the weights: the mesh that splits it, its shardings, and how it gets there."""

import math
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from conf.formats import RunFileError
from conf.schema.training.layer_kinds import holders, plain_name
from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.models import weights
from trainer.models.attention import LANES
from trainer.models.decoder import unstack_layers
from trainer.models.weights import Params
from trainer.sampler.settings import SamplerSettings

SMALL_MODEL_BYTES = 512 << 20
"""Bytes that a device reads faster than a token's all-reduces take (v5e: 0.6 ms), so further sharding gains nothing."""
RESHARD_BYTES = 2 << 30
"""Most bytes of the copy that one program moves to a device: there they are twice, as they arrive and as they stay."""


def sampler_model(cfg: Model, settings: SamplerSettings) -> Model:
    """Return the model config that the sampler computes with."""
    changes = {"activation_dtype": settings.dtype or cfg.activation_dtype, "remat": "none"}
    return cfg.model_copy(update=changes)


def sampler_mesh(cfg: Model, settings: SamplerSettings, mesh: Mesh) -> Mesh:
    """Return the sampler's mesh over the trainer's devices, in the same order.

    Every token reads all weights. Sharded by heads (`tensor`), each device reads its own part, at the cost of two small
    all-reduces per layer; sharded as for training (`fsdp`), all weights would be gathered for each token. `expert`
    splits experts alone.

    If `settings.mesh` is None, tensor is the smallest size that makes the copy small on each device, among those that
    divide heads, widths, vocabulary and the devices; otherwise the largest of them. expert is as for training, but if
    the copy is not small so: then it takes the devices that tensor leaves. Raises RunFileError.
    """
    devices, expert = math.prod(mesh.shape.values()), mesh.shape["expert"]
    if settings.mesh is not None:
        try:
            sizes = meshes.axis_sizes(settings.mesh, devices)
        except RunFileError as error:
            raise RunFileError(f"loop.sampler.{error}") from None
        tensor, expert = sizes["tensor"], sizes["expert"]
    else:
        size = weights.num_params(cfg) * jnp.dtype(sampler_model(cfg, settings).activation_dtype).itemsize
        possible = _tensor_sizes(cfg, devices // expert)
        tensor = next((n for n in possible if size // n <= SMALL_MODEL_BYTES), possible[-1])
        if cfg.experts is not None and size // tensor > SMALL_MODEL_BYTES:
            expert = math.gcd(cfg.experts.count, devices // tensor)
    assert mesh.devices is not None, "a mesh of devices"
    arranged = mesh.devices.reshape(devices // (tensor * expert), 1, tensor, expert)
    found = Mesh(arranged, meshes.MESH_AXES, axis_types=(AxisType.Auto,) * len(meshes.MESH_AXES))
    try:
        weights.param_shardings(cfg, found)
    except RunFileError as error:
        raise RunFileError(f"loop.sampler.{error}") from None
    return found


def _tensor_sizes(cfg: Model, devices: int) -> list[int]:
    """Return the sizes of the axis `tensor` that split the model evenly, in order.

    Parts of an expert's width are whole lanes if the width is: on TPU, others would be padded, and copied before each
    chunk.
    """
    common = math.gcd(
        devices,
        cfg.num_kv_heads,
        cfg.num_global_kv_heads or 0,
        cfg.per_layer_dim,
        cfg.delta_net.num_key_heads if cfg.delta_net is not None else 0,
        cfg.num_heads,
        cfg.mlp_dim,
        cfg.shared_dim,
        cfg.vocab_size,
    )
    if cfg.experts is not None:
        width = cfg.experts.inner_dim or cfg.mlp_dim
        common = math.gcd(common, width if width % LANES else width // LANES)
    return [n for n in range(1, common + 1) if common % n == 0]


def copy_params(params: Params, cfg: Model) -> Params:
    """Return the weights with stacked layers unstacked into a list, so that no token slices them, in compute dtypes.

    Norms, biases, scalars and routers stay float32, as the trainer computes with them.
    """

    def typed(path: Any, weight: jax.Array) -> jax.Array:
        name = path[-1].key
        in_float32 = "norm" in name or name == "router" or name.endswith(("_bias", "_scale", "_logits", "_log"))
        return weight if in_float32 else weight.astype(cfg.activation_dtype)

    copy = jax.tree.map_with_path(typed, params)
    return copy | {"layers": unstack_layers(copy["layers"], cfg, range(cfg.num_layers))}


def param_shardings(cfg: Model, mesh: Mesh) -> Params:
    table = weights.weight_table(cfg)
    layers: list[Params] = [{} for _ in range(cfg.num_layers)]
    for name, weight in table["layers"].items():
        for layer in holders(cfg, name, range(cfg.num_layers)):
            layers[layer][plain_name(name)] = _sharding(mesh, weight.axes[1:])
    rest = {name: _sharding(mesh, weight.axes) for name, weight in table.items() if name != "layers"}
    return rest | {"layers": layers}


def _sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> jax.NamedSharding:
    """Return that of the copy, whose rows of `embed` are whole on each device."""
    return meshes.named_sharding(mesh, *(None if axis == "embed" else axis for axis in axes))


def abstract_params(cfg: Model, mesh: Mesh) -> Params:
    """Return the shapes, dtypes and shardings of the copy."""
    shapes = jax.eval_shape(lambda p: copy_params(p, cfg), weights.abstract_params(cfg))
    return meshes.with_shardings(shapes, param_shardings(cfg, mesh))


def in_parts(arrays: list[jax.ShapeDtypeStruct]) -> list[slice]:
    """Return the copy's arrays in parts of at most RESHARD_BYTES per device, or of one array."""
    begins, size = [0], 0
    for number, array in enumerate(arrays):
        assert array.sharding is not None, "the copy is on the mesh"
        own = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        if number > begins[-1] and size + own > RESHARD_BYTES:
            begins, size = [*begins, number], 0
        size += own
    return [slice(*ends) for ends in pairwise([*begins, len(arrays)])]


def by_expert_first(array: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Split what is split by expert so over all devices, on its way to a spec that splits widths too.

    From training's split of rows, each device then sends each other one its own part. Without this step, the
    partitioner would gather all experts of all layers on every device.
    """
    over = ("expert", "tensor")
    if not spec or spec[0] != "expert" or array.shape[0] % math.prod(mesh.shape[axis] for axis in over):
        return array
    return jax.lax.with_sharding_constraint(array, jax.NamedSharding(mesh, PartitionSpec(over)))

"""The copy of the weights used for decoding: its dtype, its mesh, and the program that creates it.

Every token reads all weights. Sharded by heads (`tensor`), each device reads its own part, at the cost of two small
all-reduces per layer; sharded as for training (`fsdp`), all weights would be gathered for each token.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFileError
from trainer.distributed import mesh as meshes
from trainer.models import weights
from trainer.models.decoder import unstack_layers
from trainer.models.weights import Params
from trainer.sampler.settings import SamplerSettings

SMALL_MODEL_BYTES = 512 << 20
"""Bytes that a device reads faster than a token's all-reduces take (v5e: 0.6 ms), so further sharding gains nothing."""


def sampler_model(cfg: Model, settings: SamplerSettings) -> Model:
    """Return the model config that the sampler computes with."""
    changes = {"activation_dtype": settings.dtype or cfg.activation_dtype, "remat": "none"}
    return cfg.model_copy(update=changes)


def sampler_mesh(cfg: Model, settings: SamplerSettings, mesh: Mesh) -> Mesh:
    """Return the sampler's mesh over the trainer's devices, in the same order.

    If `settings.mesh` is None, tensor is the smallest size that makes the copy small on each device, among those that
    divide heads, feed-forward width, vocabulary and devices; otherwise the largest of them. Raises RunFileError.
    """
    devices = math.prod(mesh.shape.values())
    if settings.mesh is not None:
        try:
            sizes = meshes.axis_sizes(settings.mesh, devices)
        except RunFileError as error:
            raise RunFileError(f"loop.sampler.{error}") from None
        tensor = sizes["tensor"]
    else:
        common = math.gcd(devices, cfg.num_kv_heads, cfg.num_heads, cfg.mlp_dim, cfg.vocab_size)
        size = weights.num_params(cfg) * jnp.dtype(sampler_model(cfg, settings).activation_dtype).itemsize
        possible = [n for n in range(1, common + 1) if common % n == 0]
        tensor = next((n for n in possible if size // n <= SMALL_MODEL_BYTES), possible[-1])
    assert mesh.devices is not None, "a mesh of devices"
    arranged = mesh.devices.reshape(devices // tensor, 1, tensor)
    found = Mesh(arranged, meshes.MESH_AXES, axis_types=(AxisType.Auto,) * len(meshes.MESH_AXES))
    try:
        weights.param_shardings(cfg, found)
    except RunFileError as error:
        raise RunFileError(f"loop.sampler.{error}") from None
    return found


def copy_params(params: Params, cfg: Model) -> Params:
    """Return the weights with stacked layers unstacked into a list, so that no token slices them, in compute dtypes.

    Norms, biases and scalars stay float32, as the trainer computes with them.
    """

    def typed(path: Any, weight: jax.Array) -> jax.Array:
        name = path[-1].key
        in_float32 = "norm" in name or name.endswith(("_bias", "_scale", "_logits"))
        return weight if in_float32 else weight.astype(cfg.activation_dtype)

    copy = jax.tree.map_with_path(typed, params)
    return copy | {"layers": unstack_layers(copy["layers"], cfg.num_layers)}


def param_shardings(cfg: Model, mesh: Mesh) -> Params:
    table = weights.weight_table(cfg)
    layer = {name: meshes.named_sharding(mesh, *weight.axes[1:]) for name, weight in table["layers"].items()}
    rest = {name: meshes.named_sharding(mesh, *weight.axes) for name, weight in table.items() if name != "layers"}
    return rest | {"layers": [layer] * cfg.num_layers}


def abstract_params(cfg: Model, mesh: Mesh) -> Params:
    """Return the shapes, dtypes and shardings of the copy."""
    shapes = jax.eval_shape(lambda p: copy_params(p, cfg), weights.abstract_params(cfg))
    return meshes.with_shardings(shapes, param_shardings(cfg, mesh))

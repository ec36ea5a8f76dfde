"""The weight table: all that the rest of the trainer knows about a model.

Initial values, abstract shapes, shardings and bytes per device derive from it, and so do optimizers, averages,
checkpoints and checksums. Each kind of model has a module with its table.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.sharding import Mesh

from conf.formats import RunFileError
from conf.schema.training.model import AnyModel
from trainer.distributed import mesh as meshes
from trainer.distributed.checksums import named_leaves

Params = dict[str, Any]
"""The weights: arrays in the tree of `weight_table`."""

TABLES = {"decoder": "trainer.models.decoder_weights", "trm": "trainer.models.trm"}
"""Modules with `weight_table(cfg)`, by the model's kind."""


@dataclass(frozen=True)
class Weight:
    """One weight of the table.

    Attributes:
        shape: its shape.
        axes: the logical name of each axis (`mesh.LOGICAL_AXIS_RULES` maps them); "layers" is the first one of weights
            that are stacked over layers.
        init: its initializer.
        trained: false for a constant or a frozen weight, which has no gradient and no state of an optimizer.
        counted: whether it counts as a parameter.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initializer
    dtype: str = "float32"
    trained: bool = True
    counted: bool = True


def uniform(bound: float) -> Initializer:
    """Return the initializer that draws from -bound to bound."""

    def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound, out_sharding=out_sharding)

    return init


def weight_table(cfg: AnyModel) -> Params:
    """Return the tree of every `Weight` of the model."""
    return importlib.import_module(TABLES[cfg.kind]).weight_table(cfg)


def init_params(cfg: AnyModel, key: jax.Array) -> Params:
    """Return initial weights; equal keys give equal weights on any number of devices. Jit it to shard them."""
    weights, tree = jax.tree.flatten(weight_table(cfg))
    keys = jax.random.split(key, len(weights))
    return tree.unflatten([w.init(k, w.shape, jnp.dtype(w.dtype)) for w, k in zip(weights, keys, strict=True)])


def abstract_params(cfg: AnyModel) -> Params:
    """Return the shape and dtype of every weight without allocating arrays."""
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), weight_table(cfg))


def trained_part(tree: Params, cfg: AnyModel) -> Params:
    """Return the part of a tree like the weights that training changes; the tree itself if that is all of it."""
    table = weight_table(cfg)
    is_all = all(weight.trained for weight in jax.tree.leaves(table))
    return tree if is_all else select(tree, table, lambda weight: weight.trained)


def select(tree: Params, others: Params, wanted: Callable[[Any], bool] = lambda _: True) -> Params:
    """Return the entries of a tree at the places of `others` whose entry there is wanted."""
    found: Params = {}
    for name, entry in others.items():
        if not isinstance(entry, dict):
            found |= {name: tree[name]} if wanted(entry) else {}
        elif below := select(tree[name], entry, wanted):
            found[name] = below
    return found


def overlay(tree: Params, changes: Params) -> Params:
    """Return a tree of weights with those of `changes` in place of, or beside, its own."""
    below = {name: overlay(tree[name], x) if isinstance(x, dict) and name in tree else x for name, x in changes.items()}
    return {**tree, **below}


def num_params(cfg: AnyModel) -> int:
    return sum(math.prod(weight.shape) for weight in jax.tree.leaves(weight_table(cfg)) if weight.counted)


def param_shardings(cfg: AnyModel, mesh: Mesh) -> Params:
    """Return the sharding of every weight on the mesh.

    Raises RunFileError if an axis cannot be split evenly.
    """
    table = weight_table(cfg)
    for path, weight in named_leaves(table).items():
        for size, axis in zip(weight.shape, weight.axes, strict=True):
            parts = 1 if axis is None else meshes.num_shards(mesh, axis)
            if axis is not None and size % parts:
                raise RunFileError(
                    f"mesh.{meshes.names_of(mesh, axis)}: {parts} devices cannot split the {size} {axis} of {path} "
                    "evenly"
                )
    return jax.tree.map(lambda w: meshes.named_sharding(mesh, *w.axes), table)

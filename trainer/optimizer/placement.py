"""Shardings of the optimizer's state: each moment follows its weight along the axes they share."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, keystr

from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.models.weights import weight_table
from trainer.optimizer.matrices import MatrixView, matrix_views


def state_shardings(state: Any, cfg: Model, mesh: Mesh) -> Any:
    """Return a sharding for each array of an abstract optimizer state; counters are replicated.

    A moment is found by its weight's path. It has the weight's shape, or that of its matrix without one of the axes
    (means of rows or columns).
    """
    shapes = matrix_views(cfg)
    specs = {
        keystr(path, simple=True, separator="."): (weight.shape, meshes.partition_spec(*weight.axes))
        for path, weight in jax.tree.leaves_with_path(weight_table(cfg))
    }

    def place(path: Any, x: Any) -> NamedSharding:
        name = _weight_path(path)
        if name not in specs:
            return NamedSharding(mesh, PartitionSpec())
        shape, spec = specs[name]
        return NamedSharding(mesh, spec if x.shape == shape else _factored_spec(x.shape, shapes[name]))

    return jax.tree.map_with_path(place, state)


def _weight_path(path: tuple[Any, ...]) -> str:
    """Return the dotted weight path at the end of a path in the state."""
    last = len(path)
    while last and isinstance(path[last - 1], DictKey):
        last -= 1
    return keystr(path[last:], simple=True, separator=".")


def _factored_spec(shape: tuple[int, ...], view: MatrixView) -> PartitionSpec:
    """Return the partition of a moment that lacks one axis of the matrix; one that lacks more is not split."""
    axes = [group[0] for group in view.axes]
    for i in range(len(view.shape)):
        if view.shape[:i] + view.shape[i + 1 :] == shape:
            return meshes.partition_spec(*axes[:i], *axes[i + 1 :])
    return meshes.partition_spec(*axes) if view.shape == shape else PartitionSpec()

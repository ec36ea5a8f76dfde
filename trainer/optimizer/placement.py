"""How the mesh splits the optimizer's state: each moment as the weight it belongs to, along the axes that it has."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, keystr

from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.models.weights import weight_table
from trainer.optimizer.matrices import MatrixView, matrix_views


def state_shardings(state: Any, cfg: Model, mesh: Mesh) -> Any:
    """A sharding for each array of an abstract state of the optimizer: counters are everywhere.

    A moment lies in the state under the path of its weight. It has the weight's shape, or that of its matrix without
    one of the axes (means of rows or columns).
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
    """The dotted path of the weight at the end of a path in the state."""
    last = len(path)
    while last and isinstance(path[last - 1], DictKey):
        last -= 1
    return keystr(path[last:], simple=True, separator=".")


def _factored_spec(shape: tuple[int, ...], view: MatrixView) -> PartitionSpec:
    """Of a moment that lacks an axis of the matrix; of one that lacks more: not split."""
    axes = [group[0] for group in view.axes]
    for i in range(len(view.shape)):
        if view.shape[:i] + view.shape[i + 1 :] == shape:
            return meshes.partition_spec(*axes[:i], *axes[i + 1 :])
    return meshes.partition_spec(*axes) if view.shape == shape else PartitionSpec()

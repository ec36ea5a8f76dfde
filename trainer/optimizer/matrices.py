"""Weights viewed as matrices for Muon and Adafactor: heads merged, one matrix per layer."""

import math
from dataclasses import dataclass

from conf.schema.training.model import AnyModel
from trainer.distributed.checksums import named_leaves
from trainer.models.weights import Weight, weight_table


@dataclass(frozen=True)
class MatrixView:
    """A weight with some of its axes merged.

    Attributes:
        shape: [layers, inputs, outputs] for a layer matrix, [layers, n] for a layer vector, [a, b] for another matrix.
        axes: the logical axes merged into each of these axes.
        trained: false for a constant.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str | None, ...], ...]
    trained: bool = True

    @property
    def is_stacked(self) -> bool:
        """Return whether the first axis counts layers."""
        return self.axes[:1] == (("layers",),)

    @property
    def is_matrix(self) -> bool:
        """Return whether it is a layer matrix, [layers, inputs, outputs]."""
        return self.is_stacked and len(self.shape) == 3


def matrix_views(cfg: AnyModel) -> dict[str, MatrixView]:
    """Return each weight's view by its dotted path, with the two axes of heads merged into one."""
    return {path: _matrix_view(weight) for path, weight in named_leaves(weight_table(cfg)).items()}


def _matrix_view(weight: Weight) -> MatrixView:
    merged: list[tuple[str | None, ...]] = []
    for axis in weight.axes:
        if axis == "head_dim" and merged and merged[-1][-1] in ("heads", "kv_heads"):
            merged[-1] = (*merged[-1], axis)
        else:
            merged.append((axis,))
    sizes, start = [], 0
    for group in merged:
        sizes.append(math.prod(weight.shape[start : start + len(group)]))
        start += len(group)
    return MatrixView(tuple(sizes), tuple(merged), weight.trained)

"""What the optimizer does with each weight, by its path: its matrix, direction, learning rate, decay and schedules."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import optax

from conf.formats import RunFileError
from conf.schema.training.model import AnyModel
from conf.schema.training.optimizer import (
    Adafactor,
    ConstantSchedule,
    CustomOptimizer,
    DecaySchedule,
    Muon,
    MuonParamGroup,
    Optimizer,
    ParamGroup,
    PiecewiseSchedule,
    Schedule,
    WarmupStableDecaySchedule,
)
from conf.schema.training.weight_names import wrong_groups
from trainer.distributed.checksums import leaf_path, named_leaves
from trainer.models.weights import Weight, weight_table

MERGED = (("head_dim", "heads"), ("head_dim", "kv_heads"), ("experts", "layers"))
"""Axes that become one with the axis before them."""


@dataclass(frozen=True)
class MatrixView:
    """A weight with some of its axes merged.

    Attributes:
        shape: [layers, inputs, outputs] for a layer matrix, where each expert counts as a layer, [layers, n] for a
            layer vector, [a, b] for another matrix.
        axes: the logical axes merged into each of these axes.
        trained: false for a constant.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str | None, ...], ...]
    trained: bool = True

    @property
    def is_stacked(self) -> bool:
        """Return whether the first axis counts layers."""
        return bool(self.axes) and self.axes[0][0] == "layers"


def matrix_views(cfg: AnyModel) -> dict[str, MatrixView]:
    """Return each weight's view by its dotted path: the two axes of heads are one, and each expert is a layer."""
    return {path: _matrix_view(weight) for path, weight in named_leaves(weight_table(cfg)).items()}


def _matrix_view(weight: Weight) -> MatrixView:
    merged: list[tuple[str | None, ...]] = []
    for axis in weight.axes:
        if merged and (axis, merged[-1][-1]) in MERGED:
            merged[-1] = (*merged[-1], axis)
        else:
            merged.append((axis,))
    sizes, start = [], 0
    for group in merged:
        sizes.append(math.prod(weight.shape[start : start + len(group)]))
        start += len(group)
    return MatrixView(tuple(sizes), tuple(merged), weight.trained)


ScheduleFn = Callable[[Any], jax.Array]
"""Maps the number of earlier updates to the fraction of the peak, float32."""


def schedule_factor(schedule: Schedule | None) -> ScheduleFn:
    """Return the schedule as a function; None is constant 1.

    Update n (from 1) of a warm-up has n / warmup_steps, so the first one already moves the weights. A decay begins at
    the peak with the first update of its phase, and ends after `horizon_steps` updates.
    """
    if schedule is None:
        return lambda count: jnp.ones_like(jnp.float32(count))
    if isinstance(schedule, PiecewiseSchedule):
        steps, shares = zip(*schedule.points, strict=True)
        return lambda count: jnp.interp(jnp.float32(count), jnp.float32(steps), jnp.float32(shares))
    warmup, rest = schedule.warmup_steps, _main_schedule(schedule)
    return lambda count: jnp.float32(jnp.where(count < warmup, (count + 1) / max(warmup, 1), rest(count - warmup)))


def _main_schedule(schedule: ConstantSchedule | DecaySchedule | WarmupStableDecaySchedule) -> optax.Schedule:
    """Return the schedule as a function of the updates since the warm-up."""
    if isinstance(schedule, ConstantSchedule):
        return optax.schedules.constant_schedule(1.0)
    length, final = schedule.horizon_steps - schedule.warmup_steps, schedule.final_fraction
    if isinstance(schedule, DecaySchedule):
        if schedule.kind == "cosine":
            return optax.schedules.cosine_decay_schedule(1.0, length, alpha=final)
        return optax.schedules.linear_schedule(1.0, final, length)
    stable = length - schedule.decay_steps
    return optax.schedules.linear_schedule(1.0, final, schedule.decay_steps, transition_begin=stable)


@dataclass(frozen=True)
class UpdateRule:
    """Update rule of one weight.

    Attributes:
        direction: name of the transformation it shares with others; part of the state's paths.
        lr: peak learning rate, including the factor of its shape.
        weight_decay: multiplied by that learning rate.
        cautious: decay only where the step goes towards 0.
        b1, b2: of AdamW, AdamATan2 and Lion.
        used_rows: decay only rows whose direction is not 0.
    """

    direction: str
    lr: float
    weight_decay: float
    cautious: bool = False
    b1: float = 0.0
    b2: float = 0.0
    used_rows: bool = False


def update_rules(opt: Optimizer, cfg: AnyModel) -> dict[str, UpdateRule]:
    """Return the rule of each weight by path.

    Raises RunFileError if a required group's pattern matches no weight, or the groups freeze all weights.
    """
    shapes = matrix_views(cfg)
    for key, why in wrong_groups(opt.param_groups, shapes):
        raise RunFileError(f"{key}: {why}")
    return {path: _update_rule(opt, cfg, path, view) for path, view in shapes.items()}


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `jax.tree.map` with the weight's dotted path as first argument."""
    return jax.tree.map_with_path(lambda path, *leaves: function(leaf_path(path), *leaves), tree, *rest)


def _update_rule(opt: Optimizer, cfg: AnyModel, path: str, view: MatrixView) -> UpdateRule:
    if not view.trained:
        return UpdateRule("frozen", 0.0, 0.0)
    group = next((g for g in opt.param_groups if fnmatchcase(path, g.match)), MuonParamGroup(match=path))
    is_layer_matrix = view.is_stacked and len(view.shape) == 3
    if isinstance(opt, Muon) and is_layer_matrix and group.algorithm is None:
        return _muon_rule(opt, cfg, view, group)
    base = opt.adamw if isinstance(opt, Muon) else opt
    lr, decay = _group_lr(group, base.lr, cfg), _group_weight_decay(group, base.weight_decay)
    if group.algorithm == "sign_sgd":
        return UpdateRule("sign_sgd", lr, decay, used_rows=True)
    if isinstance(base, CustomOptimizer):
        return UpdateRule("custom", lr, decay)
    if isinstance(base, Adafactor):
        within = ("", "_layers", "_experts")[len(view.axes[0]) if view.is_stacked else 0]
        return UpdateRule(f"adafactor{within}", lr, decay)
    own = (getattr(group, name, None) for name in ("b1", "b2"))
    b1, b2 = (usual if value is None else value for value, usual in zip(own, (base.b1, base.b2), strict=True))
    name = getattr(base, "kind", "adamw")
    name = name if (b1, b2) == (base.b1, base.b2) else f"{name}_{b1}_{b2}"
    return UpdateRule(name, lr, decay, b1=b1, b2=b2)


def _muon_rule(opt: Muon, cfg: AnyModel, view: MatrixView, group: ParamGroup) -> UpdateRule:
    layers = 1.0 if opt.reference_layers is None else (opt.reference_layers / cfg.num_layers) ** 2
    _, inputs, outputs = view.shape
    factor = {
        "none": 1.0,
        "aspect": max(1.0, outputs / inputs) ** 0.5,
        "match_adamw": 0.2 * max(inputs, outputs) ** 0.5,
    }[opt.shape_scale]
    decay = _group_weight_decay(group, opt.weight_decay * layers)
    return UpdateRule(
        "muon",
        _group_lr(group, opt.lr, cfg) * factor,
        decay if opt.scaled_decay else decay / factor,
        cautious=opt.cautious_weight_decay,
    )


def _group_lr(group: ParamGroup, base: float, cfg: AnyModel) -> float:
    lr = (base if group.lr is None else group.lr) * (1.0 if group.lr_scale is None else group.lr_scale)
    return lr if group.reference_dim is None else lr * (cfg.dim / group.reference_dim) ** -0.5


def _group_weight_decay(group: ParamGroup, base: float) -> float:
    return base if group.weight_decay is None else group.weight_decay

"""The optimizer: clip the global gradient norm, compute a direction for each weight, and step along it.

Directions come from Adam, AdamATan2, Lion, Adafactor, Muon, the gradient's sign or a rule of the user's own; per-weight
settings are in `rules`.
"""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from conf.schema.training.model import AnyModel
from conf.schema.training.optimizer import Adafactor, AdamAtan2, Adamw, CustomOptimizer, Lion, Muon, Optimizer
from trainer.distributed import mesh as meshes
from trainer.distributed.checksums import leaf_path, named_leaves
from trainer.extension import load_extension
from trainer.models.weights import weight_table
from trainer.optimizer import muon
from trainer.optimizer.rules import (
    MatrixView,
    ScheduleFn,
    UpdateRule,
    map_with_path,
    matrix_views,
    schedule_factor,
    update_rules,
)

MIN_SCALE = 1e-3
"""Minimum root mean square used to scale a weight's update, so that zero-initialized weights move."""


def scale_by_adafactor(opt: Adafactor, cfg: AnyModel) -> optax.GradientTransformation:
    """Return the transformation from gradients to directions, for weights of layers, of experts or outside of both.

    Adafactor (https://arxiv.org/abs/1804.04235) is optax's, applied to the matrices of each layer.

    Every matrix has factored moments, however small, and its own root mean square in each layer.
    """
    parts = [optax.scale_by_factored_rms(decay_rate=opt.decay_exponent, epsilon=opt.eps, min_dim_size_to_factor=1)]
    if opt.update_clip is not None:
        parts.append(optax.clip_by_block_rms(opt.update_clip))
    if opt.scale_by_weight:
        parts.append(optax.scale_by_param_block_rms(MIN_SCALE))
    if opt.b1 is not None:
        parts.append(optax.ema(opt.b1, debias=False))
    one, shapes = optax.chain(*parts), matrix_views(cfg)

    def viewed(tree: Any) -> Any:
        return map_with_path(lambda path, x: x.reshape(shapes[path].shape), tree)

    def stacked(tree: Any) -> bool:
        found = {shapes[path].is_stacked for path in jax.tree.leaves(map_with_path(lambda path, _: path, tree))}
        return found == {True}

    def init(params: Any) -> Any:
        return (jax.vmap(one.init) if stacked(params) else one.init)(viewed(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        each = jax.vmap(one.update) if stacked(updates) else one.update
        directions, state = each(viewed(updates), state, viewed(params))
        return jax.tree.map(lambda d, g: d.reshape(g.shape), directions, updates), state

    return optax.GradientTransformation(init, update)


class AdamAtan2State(NamedTuple):
    """Number of updates, and both moments of each weight."""

    done: Any
    mu: Any
    nu: Any


def scale_by_adam_atan2(b1: float, b2: float) -> optax.GradientTransformation:
    """Return the transformation from gradients to atan2(m, sqrt(v / (1 - b2^t))) / (1 - b1^t).

    AdamATan2 has Adam's moments, divided by atan2 (https://arxiv.org/abs/2407.05872), so that no eps sets a scale. The
    paper corrects the bias of m inside of atan2; the CUDA kernel of adam-atan2, which the tiny recursive model uses,
    outside, as here.
    """

    def init(params: Any) -> Any:
        return AdamAtan2State(jnp.int32(0), *(jax.tree.map(jnp.zeros_like, params) for _ in range(2)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        done = state.done + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
        first, second = 1 - jnp.float32(b1) ** done, jnp.sqrt(1 - jnp.float32(b2) ** done)
        steps = jax.tree.map(lambda m, v: jnp.arctan2(m, jnp.sqrt(v) / second) / first, mu, nu)
        return steps, AdamAtan2State(done, mu, nu)

    return optax.GradientTransformation(init, update)


def build_optimizer(opt: Optimizer, cfg: AnyModel) -> optax.GradientTransformation:
    """Return the optimizer. Its state is optax's, with moments in trees like the weights.

    Raises RunFileError if a group's pattern matches no weight.
    """
    by_path = update_rules(opt, cfg)
    directions: dict[Hashable, optax.GradientTransformation] = {
        rule.direction: _direction(opt, cfg, rule) for rule in by_path.values()
    }
    return optax.chain(
        optax.identity() if opt.max_grad_norm is None else optax.clip_by_global_norm(opt.max_grad_norm),
        optax.partition(directions, lambda params: map_with_path(lambda path, _: by_path[path].direction, params)),
        apply_update_rules(by_path, schedule_factor(opt.schedule), schedule_factor(opt.weight_decay_schedule)),
    )


def learning_rate_schedule(opt: Optimizer) -> ScheduleFn:
    """Return the schedule of `optimizer.lr`, for the update after `count` earlier ones.

    For telemetry: an update multiplies the rate of each rule by the same factor.
    """
    by_count = schedule_factor(opt.schedule)
    return lambda count: opt.lr * by_count(count)


def _direction(opt: Optimizer, cfg: AnyModel, rule: UpdateRule) -> optax.GradientTransformation:
    match opt:
        case _ if rule.direction == "frozen":
            return optax.set_to_zero()
        case _ if rule.used_rows:
            return optax.scale_by_sign()
        case Muon() if rule.direction == "muon":
            return muon.scale_by_muon(opt, cfg)
        case CustomOptimizer():
            return load_extension("optimizer rule", opt.rule, "optimizer.rule", opt.options)()
        case Adafactor():
            return scale_by_adafactor(opt, cfg)
        case AdamAtan2():
            return scale_by_adam_atan2(rule.b1, rule.b2)
        case Lion():
            return optax.scale_by_lion(b1=rule.b1, b2=rule.b2)
        case Muon():
            return optax.scale_by_adam(b1=rule.b1, b2=rule.b2, eps=opt.adamw.eps)
        case Adamw():
            adam = optax.scale_by_adam(b1=rule.b1, b2=rule.b2, eps=opt.eps)
            return adam if opt.update_clip is None else optax.chain(adam, optax.clip_by_block_rms(opt.update_clip))


class DescentState(NamedTuple):
    """Number of updates, an int32 scalar."""

    done: Any


def apply_update_rules(
    rules: Mapping[str, UpdateRule], rate: ScheduleFn, decay: ScheduleFn
) -> optax.GradientTransformation:
    """Turn directions into updates by each weight's rule: - rate * lr * (direction + decay * weight_decay * weight).

    rate, decay: fractions of the peak values. A cautious weight decays only where its direction has its sign, or is 0.
    """

    def init(params: Any) -> Any:
        del params
        return DescentState(jnp.int32(0))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        rates, decays = rate(state.done), decay(state.done)

        def step(path: str, direction: jax.Array, weight: jax.Array) -> jax.Array:
            rule = rules[path]
            if rule.weight_decay:
                shrunk = decays * rule.weight_decay * weight
                if rule.cautious:
                    shrunk = jnp.where(direction * weight >= 0, shrunk, 0)
                elif rule.used_rows:
                    shrunk = jnp.where((direction != 0).any(axis=-1, keepdims=True), shrunk, 0)
                direction = direction + shrunk
            return -rates * rule.lr * direction

        return map_with_path(step, updates, params), DescentState(state.done + 1)

    return optax.GradientTransformation(init, update)


def state_shardings(state: Any, cfg: AnyModel, mesh: Mesh) -> Any:
    """Return a sharding for each array of an abstract optimizer state; counters are replicated.

    A moment is found by its weight's path. It has the weight's shape, or that of its matrix without one of the axes
    (means of rows or columns).
    """
    shapes = matrix_views(cfg)
    specs = {
        path: (weight.shape, meshes.partition_spec(*weight.axes))
        for path, weight in named_leaves(weight_table(cfg)).items()
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
    return leaf_path(path[last:])


def _factored_spec(shape: tuple[int, ...], view: MatrixView) -> PartitionSpec:
    """Return the partition of a moment that lacks one axis of the matrix; one that lacks more is not split."""
    axes = [group[0] for group in view.axes]
    for i in range(len(view.shape)):
        if view.shape[:i] + view.shape[i + 1 :] == shape:
            return meshes.partition_spec(*axes[:i], *axes[i + 1 :])
    return meshes.partition_spec(*axes) if view.shape == shape else PartitionSpec()

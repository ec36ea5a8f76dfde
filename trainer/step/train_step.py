"""One optimizer update over the mesh: gradients, their sum over devices, the step. Both loops use it.

A loss returns sums and counts instead of means. Those of any split of the batch add up to those of the whole, so the
result does not depend on the number of devices, however unevenly tokens fall on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from etils import epath
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conf.schema.training.model import Model
from conf.schema.training.optimizer import Optimizer
from trainer.distributed import mesh as meshes
from trainer.models import weights
from trainer.models.weights import Params
from trainer.optimizer import placement
from trainer.optimizer.chain import build_optimizer, learning_rate_schedule
from trainer.pretrained import store

Batch = Any
"""A pytree of arrays whose first axis is the batch."""


class Largest(NamedTuple):
    """An entry that is no mean: the largest value in (a part of) the batch."""

    value: jax.Array


class Least(NamedTuple):
    """An entry that is no mean: the least value in (a part of) the batch."""

    value: jax.Array


Sums = dict[str, tuple[jax.Array, jax.Array] | Largest | Least]
"""Scalars by name: a sum over (a part of) the batch, and the count or weight to divide it by; or an extreme."""

Loss = Callable[[Params, Batch], Sums]
"""Gives at least "loss", a sum; all entries are plain sums, or extremes, over rows of the batch."""


class State(NamedTuple):
    """What an update changes: arrays, or in their place their abstract shapes or shardings."""

    step: Any  # int32 scalar: updates done
    params: Any  # Params
    optimizer: Any  # optax.OptState
    skipped: Any  # int32 scalar: updates that changed nothing, since loss or gradient was not finite
    average: Any  # Params, averaged over the updates; None: `optimizer.ema_decay` is null


def init_state(cfg: Model, opt: Optimizer, mesh: Mesh, key: jax.Array) -> State:
    """First state, each array made on the devices that hold it; the weights are read where `model.weights` says so.

    Raises StoreError where those are not there, or of another model.
    """
    if cfg.weights is not None:
        params = store.place(epath.Path(cfg.weights), cfg, mesh)
        placed = state_shardings(cfg, opt, mesh)
        return jax.jit(lambda p: fresh(p, cfg, opt), out_shardings=placed, donate_argnums=0)(params)

    def make(key: jax.Array) -> State:
        return fresh(weights.init(cfg, key), cfg, opt)

    # it runs once: on CPU the compiler's optimizations would cost several times what they save
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(make, out_shardings=state_shardings(cfg, opt, mesh), compiler_options=options)(key)


def fresh(params: Params, cfg: Model, opt: Optimizer) -> State:
    """These weights, with an optimizer that has seen nothing."""
    moments = build_optimizer(opt, cfg).init(params)
    return State(jnp.int32(0), params, moments, jnp.int32(0), None if opt.ema_decay is None else params)


def for_evaluation(state: State) -> Params:
    """The weights to evaluate: their average, where there is one."""
    return state.params if state.average is None else state.average


def abstract_state(cfg: Model, opt: Optimizer, mesh: Mesh) -> State:
    """Shape, type and sharding of every array of the state: what a checkpoint is restored into."""
    state = jax.eval_shape(lambda p: fresh(p, cfg, opt), weights.abstract(cfg))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, state_shardings(cfg, opt, mesh)
    )


def state_shardings(cfg: Model, opt: Optimizer, mesh: Mesh) -> State:
    """Moments and averages are split like their weights; the rest is on every device."""
    params = weights.shardings(cfg, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    moments = jax.eval_shape(build_optimizer(opt, cfg).init, weights.abstract(cfg))
    placed = placement.shardings(moments, cfg, mesh)
    return State(everywhere, params, placed, everywhere, None if opt.ema_decay is None else params)


def build(loss: Loss, cfg: Model, opt: Optimizer, mesh: Mesh, accumulation: int = 1) -> jax.stages.Wrapped:
    """The jitted update: (state, batch) to (state, metrics). The old state's buffers are given up to the new one.

    accumulation: parts that the batch is computed in, one after the other; above 1 its leaves are [A, B / A, ...]. The
    result is that of the whole batch, whatever counts in each part.
    An update whose loss or gradient is not finite changes nothing but the counters, and schedules do not move.
    Metrics are float32 scalars: every entry of the loss as a mean, grad_norm (before clipping), learning_rate, finite
    (1 or 0) and skipped, the number of updates so far that were not finite.
    """
    chain, rate = build_optimizer(opt, cfg), learning_rate_schedule(opt)
    gradient = mean_gradient(loss, cfg, mesh, accumulation)

    def update(state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        gradients, metrics = gradient(state.params, batch)
        norm, done = optax.tree_utils.tree_norm(gradients), state.step - state.skipped
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])

        def apply() -> tuple[Any, Any, Any]:
            changes, moments = chain.update(gradients, state.optimizer, state.params)
            params = optax.apply_updates(state.params, changes)
            return params, moments, _averaged(state, params, opt)

        with jax.named_scope("optimizer"):
            # a branch, not a choice between two results, both of which would have to exist
            unchanged = (state.params, state.optimizer, state.average)
            params, moments, average = lax.cond(finite, apply, lambda: unchanged)
        skipped = state.skipped + jnp.where(finite, 0, 1)
        metrics |= {"grad_norm": norm, "learning_rate": rate(done), "finite": jnp.float32(finite)}
        metrics["skipped"] = jnp.float32(skipped)
        return State(state.step + 1, params, moments, skipped, average), metrics

    return jax.jit(update, donate_argnums=0, out_shardings=(state_shardings(cfg, opt, mesh), None))


def _averaged(state: State, params: Any, opt: Optimizer) -> Any:
    """The average with the new weights in it. Early on it forgets faster, as TensorFlow's ExponentialMovingAverage with
    `num_updates`: the first weights are random.
    """
    if opt.ema_decay is None:
        return None
    done = state.step - state.skipped + 1
    kept = jnp.minimum(opt.ema_decay, (1 + done) / (10 + done))
    return jax.tree.map(lambda mean, weight: mean + (1 - kept) * (weight - mean), state.average, params)


def mean_gradient(
    loss: Loss, cfg: Model, mesh: Mesh, accumulation: int = 1
) -> Callable[[Params, Batch], tuple[Params, dict[str, jax.Array]]]:
    """A function (params, batch) to the gradient of the mean loss and the means of all entries; to be called in a jit.

    accumulation: as in `build`. Sums and counts of the parts are added up; the gradient is split as the weights are.
    Where every device holds all weights, each computes the gradient of its own rows, and gradients and metrics go
    through ONE all-reduce as one flat vector: on CPU a collective per weight costs several times the computation.
    Extremes take a second one, of a few bytes. Otherwise the partitioner places the collectives, by the shardings of
    its arguments.
    """

    def summed(params: Params, batch: Batch) -> tuple[Params, Sums]:
        def total(params: Params) -> tuple[jax.Array, Sums]:
            sums = jax.tree.map(jnp.float32, loss(params, batch))
            return sums["loss"][0], sums

        return jax.grad(total, has_aux=True)(params)

    def accumulated(params: Params, batch: Batch) -> tuple[Params, Sums]:
        if accumulation == 1:
            return summed(params, batch)

        def add(total: tuple[Params, Sums], part: Batch) -> tuple[tuple[Params, Sums], None]:
            gradients, sums = summed(params, part)
            return placed((jax.tree.map(jnp.add, total[0], gradients), _joined(total[1], sums))), None

        first, named = jax.eval_shape(summed, params, jax.tree.map(lambda x: x[0], batch))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), first)
        return lax.scan(add, placed((zeros, _nothing(named))), batch)[0]

    def placed(total: tuple[Params, Sums]) -> tuple[Params, Sums]:
        if meshes.is_data_parallel(mesh):
            return total
        return lax.with_sharding_constraint(total[0], weights.shardings(cfg, mesh)), total[1]

    def summed_at_once(params: Params, batch: Batch) -> tuple[Params, Sums]:
        return _all_reduced(*accumulated(params, batch))

    over_mesh = accumulated
    if meshes.is_data_parallel(mesh):
        # check_vma would make the gradient of a replicated weight an all-reduce of its own
        rows = meshes.spec("batch") if accumulation == 1 else meshes.spec(None, "batch")
        specs = {"in_specs": (PartitionSpec(), rows), "out_specs": PartitionSpec()}
        over_mesh = jax.shard_map(summed_at_once, mesh=mesh, check_vma=False, **specs)

    def mean(params: Params, batch: Batch) -> tuple[Params, dict[str, jax.Array]]:
        gradients, sums = over_mesh(params, batch)
        means = {name: _mean(entry) for name, entry in sums.items()}
        count = sums["loss"][1]  # pyright: ignore[reportGeneralTypeIssues]
        return jax.tree.map(lambda g: g / jnp.where(count == 0, 1, count), gradients), means

    return mean


def _all_reduced(gradients: Params, sums: Sums) -> tuple[Params, Sums]:
    """Added up over the devices of a shard_map, as one vector; extremes in a second one."""
    extremes = {name: entry for name, entry in sums.items() if isinstance(entry, Largest | Least)}
    flat, unravel = ravel_pytree((gradients, {n: entry for n, entry in sums.items() if n not in extremes}))
    gradients, sums = unravel(lax.psum(flat, meshes.AXES))
    if extremes:
        signed = jnp.stack([_sign(entry) * entry.value for entry in extremes.values()])
        found = zip(extremes.items(), lax.pmax(signed, meshes.AXES), strict=True)
        sums |= {name: type(entry)(_sign(entry) * value) for (name, entry), value in found}
    return gradients, sums


def _joined(a: Sums, b: Sums) -> Sums:
    """Of two parts of the batch."""
    return {name: _both(entry, b[name]) for name, entry in a.items()}


def _both(a: Any, b: Any) -> Any:
    match a:
        case Largest(value):
            return Largest(jnp.maximum(value, b.value))
        case Least(value):
            return Least(jnp.minimum(value, b.value))
    return a[0] + b[0], a[1] + b[1]


def _nothing(sums: Sums) -> Sums:
    """Of no part of the batch."""

    def none(entry: Any) -> Any:
        zero = jnp.float32(0)
        return type(entry)(zero - _sign(entry) * jnp.inf) if isinstance(entry, Largest | Least) else (zero, zero)

    return {name: none(entry) for name, entry in sums.items()}


def _sign(extreme: Largest | Least) -> float:
    return 1.0 if isinstance(extreme, Largest) else -1.0


def _mean(entry: Any) -> jax.Array:
    if isinstance(entry, Largest | Least):
        return entry.value
    total, count = entry
    return total / jnp.where(count == 0, 1, count)

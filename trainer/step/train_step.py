"""One optimizer update over the mesh: gradients, their all-reduce, the optimizer step. All loops use it.

A loss returns sums and counts instead of means (`metric_sums`), so the result does not depend on the batch split.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from etils import epath
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conf.schema.training.model import AnyModel
from conf.schema.training.optimizer import Optimizer
from trainer.distributed import mesh as meshes
from trainer.distributed.mesh import DeviceBatch
from trainer.models import weights
from trainer.models.weights import Params
from trainer.optimizer import chain
from trainer.optimizer.chain import build_optimizer, learning_rate_schedule
from trainer.pretrained import store
from trainer.step import metric_sums
from trainer.step.metric_sums import Mean, MetricSums

LossFn = Callable[[Params, DeviceBatch], MetricSums]
"""Returns at least "loss", a `Mean` over the rows of the batch."""

CarryLossFn = Callable[[Params, DeviceBatch, Any], tuple[MetricSums, Any]]
"""As LossFn, with arrays that each row carries from one update to the next: (params, batch, carry) to (sums, carry)."""
Summed = Callable[[Params, DeviceBatch, Any], tuple[Params, MetricSums, Any]]
"""From (params, batch, carry) to gradients, sums of metrics and a new carry."""


class State(NamedTuple):
    """Training state that an update changes: arrays, or their abstract shapes or shardings."""

    step: Any  # int32 scalar: number of updates
    params: Any  # Params
    optimizer: Any  # optax.OptState
    skipped: Any  # int32 scalar: updates skipped because loss or gradient was not finite
    average: Any  # trained Params averaged over updates; None if `optimizer.ema_decay` is null
    carry: Any = None  # arrays [batch, ...] that a CarryLossFn hands to the next update


def init_state(cfg: AnyModel, opt: Optimizer, mesh: Mesh, key: jax.Array) -> State:
    """Return the initial state, each array created on its own devices; `model.weights` may name a weights file.

    Raises StoreError if those weights do not exist or belong to another model.
    """
    if cfg.weights is not None:
        params = store.load_sharded(epath.Path(cfg.weights), cfg, mesh)
        placed = state_shardings(cfg, opt, mesh)

        def with_adapters(params: Params, key: jax.Array) -> State:
            return new_state(weights.overlay(weights.init_params(cfg, key), params), cfg, opt)

        return jax.jit(with_adapters, out_shardings=placed, donate_argnums=0)(params, key)

    def make(key: jax.Array) -> State:
        return new_state(weights.init_params(cfg, key), cfg, opt)

    # it runs once; on CPU, compiler optimizations would cost several times what they save
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(make, out_shardings=state_shardings(cfg, opt, mesh), compiler_options=options)(key)


def new_state(params: Params, cfg: AnyModel, opt: Optimizer) -> State:
    trained = weights.trained_part(params, cfg)
    moments = build_optimizer(opt, cfg).init(trained)
    return State(jnp.int32(0), params, moments, jnp.int32(0), None if opt.ema_decay is None else trained)


def eval_params(state: State) -> Params:
    """Return the weights to evaluate: the average if there is one, beside frozen weights."""
    return state.params if state.average is None else weights.overlay(state.params, state.average)


def abstract_state(cfg: AnyModel, opt: Optimizer, mesh: Mesh) -> State:
    """Return the shape, dtype and sharding of every array of the state, which checkpoints are restored into."""
    state = jax.eval_shape(lambda p: new_state(p, cfg, opt), weights.abstract_params(cfg))
    return meshes.with_shardings(state, state_shardings(cfg, opt, mesh))


def state_shardings(cfg: AnyModel, opt: Optimizer, mesh: Mesh) -> State:
    """Return the state's shardings: moments and averages follow their weights; the rest is replicated."""
    params = weights.param_shardings(cfg, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    trained = weights.trained_part(params, cfg)
    moments = jax.eval_shape(build_optimizer(opt, cfg).init, weights.trained_part(weights.abstract_params(cfg), cfg))
    placed = chain.state_shardings(moments, cfg, mesh)
    return State(everywhere, params, placed, everywhere, None if opt.ema_decay is None else trained)


def build_update(loss: LossFn, cfg: AnyModel, opt: Optimizer, mesh: Mesh, accumulation: int = 1) -> jax.stages.Wrapped:
    """Return the update of a loss that carries nothing, see `build_carry_update`."""
    return build_carry_update(without_carry(loss), cfg, opt, mesh, None, accumulation)


def build_carry_update(
    loss: CarryLossFn, cfg: AnyModel, opt: Optimizer, mesh: Mesh, carry: Any, accumulation: int = 1
) -> jax.stages.Wrapped:
    """Return the jitted update, (state, batch) to (state, metrics). It donates the old state's buffers.

    carry: shardings of `State.carry`.
    accumulation: parts of the batch that are computed sequentially; above 1 its leaves are [A, B / A, ...]. The result
    equals that of the whole batch, however many tokens count in each part.
    An update whose loss or gradient is not finite changes only the counters, and schedules do not advance.
    Metrics are float32 scalars: every entry of the loss as a mean, grad_norm (before clipping), learning_rate, finite
    (1 or 0) and skipped, the number of non-finite updates so far.
    """
    chain, rate = build_optimizer(opt, cfg), learning_rate_schedule(opt)
    gradient = mean_gradient(loss, cfg, mesh, accumulation)

    def update(state: State, batch: DeviceBatch) -> tuple[State, dict[str, jax.Array]]:
        gradients, metrics, carry = gradient(state.params, batch, state.carry)
        norm, done = optax.tree_utils.tree_norm(gradients), state.step - state.skipped
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])

        def apply() -> tuple[Any, ...]:
            old = weights.trained_part(state.params, cfg)
            changes, moments = chain.update(gradients, state.optimizer, old)
            new: Any = optax.apply_updates(old, changes)
            return weights.overlay(state.params, new), moments, _update_average(state, new, opt), carry

        with jax.named_scope("optimizer"):
            # a branch, because a select would compute both results
            unchanged = (state.params, state.optimizer, state.average, state.carry)
            params, moments, average, carry = lax.cond(finite, apply, lambda: unchanged)
        skipped = state.skipped + jnp.where(finite, 0, 1)
        metrics |= {"grad_norm": norm, "learning_rate": rate(done), "finite": jnp.float32(finite)}
        metrics["skipped"] = jnp.float32(skipped)
        return State(state.step + 1, params, moments, skipped, average, carry), metrics

    placed = state_shardings(cfg, opt, mesh)._replace(carry=carry)
    return jax.jit(update, donate_argnums=0, out_shardings=(placed, None))


def without_carry(loss: LossFn) -> CarryLossFn:
    """Return the loss as one that hands nothing to the next update."""
    return lambda params, batch, carry: (loss(params, batch), carry)


def _update_average(state: State, params: Any, opt: Optimizer) -> Any:
    """Return the average updated with the new weights.

    With `ema_warmup` it decays faster early on, like TensorFlow's ExponentialMovingAverage with `num_updates`: initial
    weights are random.
    """
    if opt.ema_decay is None:
        return None
    done = state.step - state.skipped + 1
    kept = jnp.minimum(opt.ema_decay, (1 + done) / (10 + done)) if opt.ema_warmup else opt.ema_decay
    return jax.tree.map(lambda mean, weight: mean + (1 - kept) * (weight - mean), state.average, params)


def _over_parts(summed: Summed, placed: Callable[[tuple[Params, MetricSums]], tuple[Params, MetricSums]]) -> Summed:
    """Return `summed` with its results added up over the parts of a batch, one after the other; there is no carry."""

    def accumulated(params: Params, batch: DeviceBatch, carry: Any) -> tuple[Params, MetricSums, Any]:
        def add(total: tuple[Params, MetricSums], part: DeviceBatch) -> tuple[tuple[Params, MetricSums], None]:
            gradients, sums, _ = summed(params, part, None)
            return placed((jax.tree.map(jnp.add, total[0], gradients), metric_sums.merge(total[1], sums))), None

        first, named, _ = jax.eval_shape(summed, params, jax.tree.map(lambda x: x[0], batch), None)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), first)
        return *lax.scan(add, placed((zeros, metric_sums.zero(named))), batch)[0], None

    return accumulated


def mean_gradient(
    loss: CarryLossFn, cfg: AnyModel, mesh: Mesh, accumulation: int = 1
) -> Callable[[Params, DeviceBatch, Any], tuple[Params, dict[str, jax.Array], Any]]:
    """Return a function from (params, batch, carry) to the gradient of the mean loss, the mean metrics and a new carry.

    Call it under jit. The gradient is that of the trained weights only, and sharded like them.

    accumulation: as in `build_update`. Sums and counts of the parts are added up. A loss that has a carry computes all
    rows at once.
    Where weights are replicated, each device computes the gradient of its own rows, and gradients and metrics go
    through ONE all-reduce as one flat vector: on CPU a collective per weight costs several times the computation.
    Extremes take a second one, of a few bytes. Otherwise the partitioner places the collectives by the shardings of its
    arguments.
    """

    def summed(params: Params, batch: DeviceBatch, carry: Any) -> tuple[Params, MetricSums, Any]:
        def total(trained: Params) -> tuple[jax.Array, tuple[MetricSums, Any]]:
            sums, new = loss(weights.overlay(params, trained), batch, carry)
            sums = jax.tree.map(jnp.float32, sums)
            return loss_of(sums).total, (sums, new)

        gradients, (sums, new) = jax.grad(total, has_aux=True)(weights.trained_part(params, cfg))
        return gradients, sums, new

    def placed(total: tuple[Params, MetricSums]) -> tuple[Params, MetricSums]:
        if meshes.is_data_parallel(mesh):
            return total
        placed = weights.trained_part(weights.param_shardings(cfg, mesh), cfg)
        return lax.with_sharding_constraint(total[0], placed), total[1]

    accumulated = summed if accumulation == 1 else _over_parts(summed, placed)

    def summed_at_once(params: Params, batch: DeviceBatch, carry: Any) -> tuple[Params, MetricSums, Any]:
        gradients, sums, new = accumulated(params, batch, carry)
        return *metric_sums.all_reduce(gradients, sums), new

    over_mesh = accumulated
    if meshes.is_data_parallel(mesh):
        # check_vma would make the gradient of a replicated weight an all-reduce of its own
        rows = meshes.partition_spec("batch") if accumulation == 1 else meshes.partition_spec(None, "batch")
        everywhere = PartitionSpec()
        over_mesh = jax.shard_map(
            summed_at_once,
            mesh=mesh,
            in_specs=(everywhere, rows, rows),
            out_specs=(everywhere, everywhere, rows),
            check_vma=False,
        )

    def mean(params: Params, batch: DeviceBatch, carry: Any) -> tuple[Params, dict[str, jax.Array], Any]:
        gradients, sums, new = over_mesh(params, batch, carry)
        weight = loss_of(sums).weight
        return jax.tree.map(lambda g: g / jnp.where(weight == 0, 1, weight), gradients), metric_sums.finalize(sums), new

    return mean


def loss_of(sums: MetricSums) -> Mean:
    """Return the entry that is differentiated."""
    loss = sums["loss"]
    assert isinstance(loss, Mean), "a loss is a mean"
    return loss

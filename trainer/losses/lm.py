"""The loss and evaluation metrics of next-token prediction.

Both are sums over tokens with their divisors, so they add up over any split of the batch.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.layer_kinds import layer_kind
from conf.schema.training.loop import LmLoop
from conf.schema.training.model import Model
from trainer.distributed.mesh import DeviceBatch, over_devices
from trainer.extension import load_extension
from trainer.losses import token_logprobs
from trainer.models import decoder, experts, maha, residual
from trainer.models.weights import Params
from trainer.step.metric_sums import Mean, MetricSums
from trainer.step.train_step import LossFn


class _Walk(NamedTuple):
    """Carried from layer to layer; statistics are largest values so far, per token or scalar."""

    x: jax.Array
    product: jax.Array  # [n, n, ...]
    row_error: jax.Array
    column_error: jax.Array
    gain: jax.Array
    concentration: jax.Array


def measured_forward(
    params: Params, cfg: Model, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None = None
) -> tuple[jax.Array, MetricSums]:
    """Return `decoder.forward`, and sums over tokens of what every connection of the batch did.

    Rows and columns of each connection's matrix H should add up to 1 in a stable network. Its gain is the largest such
    sum: by rows how much an activation can grow, by columns a gradient. The product over all layers is what lies
    between input and output; the share of its diagonal is 1 if every stream keeps to itself and 1 / n if they have
    become one.
    """
    cfg = cfg.model_copy(update={"remat": "none"})  # the feed-forward block as a whole, which no loop hides
    attention = decoder.causal_attention(segments, cfg)
    first = decoder.embed(params, cfg, tokens, positions)

    def layer(i: int, walk: _Walk, weights: Params) -> _Walk:
        seen: list[residual.Mixing] = []

        def connect(branch: residual.Branch, x: jax.Array, weights: Params, name: str, cfg: Model) -> jax.Array:
            seen.append(residual.compute_mixing(x, weights, name, cfg))
            return residual.connect(branch, x, weights, name, cfg)

        kind = layer_kind(cfg, i)
        x = decoder.decoder_layer(walk.x, first, weights, cfg, positions, kind, attention, connect)
        for mixing in seen:
            walk = _after(walk, mixing)
        return walk._replace(x=x)

    walk = decoder.apply_layers(params["layers"], cfg, _begin(first, cfg), layer)
    return decoder.final_hidden(walk.x, params, cfg), _sums(walk)


def _begin(first: jax.Array, cfg: Model) -> _Walk:
    by_token = () if cfg.residual == "nash_hc" else first.shape[:2]
    n, zero = cfg.dim if cfg.residual == "nash_hc" else cfg.hyper.streams, jnp.zeros(by_token)
    same = jnp.broadcast_to(jnp.eye(n).reshape(n, n, *(1 for _ in by_token)), (n, n, *by_token))
    return _Walk(first, same, zero, zero, zero, zero)


def _after(walk: _Walk, mixing: residual.Mixing) -> _Walk:
    rows, columns = mixing.streams.sum(axis=1), mixing.streams.sum(axis=0)
    shares = 1.0 if mixing.write is None else (mixing.write / mixing.write.sum(axis=0)).max(axis=0)
    return walk._replace(
        product=jnp.einsum("ij...,jk...->ik...", mixing.streams, walk.product),
        row_error=jnp.maximum(walk.row_error, jnp.abs(rows - 1).max(axis=0)),
        column_error=jnp.maximum(walk.column_error, jnp.abs(columns - 1).max(axis=0)),
        gain=jnp.maximum(walk.gain, _gain(mixing.streams)),
        concentration=jnp.maximum(walk.concentration, shares),
    )


def _gain(matrix: jax.Array) -> jax.Array:
    sums = partial(jnp.sum, jnp.abs(matrix))
    return jnp.maximum(sums(axis=1).max(axis=0), sums(axis=0).max(axis=0))


def _sums(walk: _Walk) -> MetricSums:
    found = {
        "row_error": walk.row_error,
        "column_error": walk.column_error,
        "gain": walk.gain,
        "product_gain": _gain(walk.product),
        "product_diagonal": jnp.trace(walk.product) / len(walk.product),
        "concentration": walk.concentration,
    }
    return {f"residual_{name}": Mean(x.sum(), jnp.float32(x.size)) for name, x in found.items()}


EvalFn = Callable[[Params, jax.Array, DeviceBatch], MetricSums]
"""Maps (weights, bytes of text by token [2, vocab], see `batches.Dataset.text_bytes`, batch) to metric sums."""


def loss(cfg: Model, loop: LmLoop | None = None) -> LossFn:
    """Return the loss of the weighted targets: the cross-entropy in nats, or the user's own (`loop.loss`).

    A batch holds `tokens`, `targets` and `weights` [B, T], plus `segments` and `positions` if documents share a row.
    """
    if loop is not None and loop.loss != "cross_entropy":
        return _own_loss(cfg, loop)

    def sums(params: Params, batch: DeviceBatch) -> MetricSums:
        hidden, load = _hidden_and_load(params, cfg, batch)
        nats = token_logprobs.cross_entropy(hidden, params, batch["targets"], batch["weights"], cfg)
        return _components(cfg, nats, nats, batch["weights"].sum(), load)

    return sums


def _own_loss(cfg: Model, loop: LmLoop) -> LossFn:
    own = load_extension("token loss", loop.loss, "loop.loss", loop.loss_options)

    def sums(params: Params, batch: DeviceBatch) -> MetricSums:
        (hidden, load), weight = _hidden_and_load(params, cfg, batch), batch["weights"]
        logprobs, entropy = token_logprobs.token_logprobs(hidden, params, batch["targets"], cfg)
        terms = own(logprobs, entropy)
        lm_loss = -(logprobs * weight).sum()
        return _components(cfg, (terms * weight).sum(), lm_loss, weight.sum(), load) | {
            "lm_loss": Mean(lm_loss, weight.sum())
        }

    return sums


def _components(
    cfg: Model, objective: jax.Array, lm_loss: jax.Array, total: jax.Array, load: experts.Load | None
) -> MetricSums:
    """Return the loss, where it has penalties what it consists of, and the load of the experts.

    objective, lm_loss, total: sums over tokens of the loss without penalties, of the cross-entropy, of the weights.
    """
    found: MetricSums = {}
    if cfg.attention_form == "maha":
        sparsity = maha.sparsity_penalty(cfg) * total
        objective, found["sparsity"] = objective + sparsity, Mean(sparsity, total)
    if load is not None:
        per_token = over_devices(total) / jnp.maximum(over_devices(load.tokens), 1)
        objective = objective + cfg.router_aux_loss_coef * per_token * load.balance
        found["router_aux_loss"] = Mean(load.balance, load.tokens)
        found["busiest_expert"] = Mean(load.busiest, load.tokens)
    if cfg.attention_form == "maha" or cfg.router_aux_loss_coef:
        found["lm_loss"] = Mean(lm_loss, total)
    return {"loss": Mean(objective, total)} | found


def build_eval(cfg: Model, accumulation: int) -> EvalFn:
    """Return a function that computes a batch's loss and its bits per byte of text, excluding special tokens.

    accumulation: above 1 the batch is [A, B / A, T], and its parts are computed sequentially.
    """

    def part(params: Params, text_bytes: jax.Array, batch: DeviceBatch) -> MetricSums:
        stability: MetricSums = {}
        if cfg.residual == "plain":
            hidden = _hidden_states(params, cfg, batch)
        else:
            hidden, stability = measured_forward(
                params, cfg, batch["tokens"], _positions_of(batch), batch.get("segments")
            )
        logprobs, _ = token_logprobs.token_logprobs(hidden, params, batch["targets"], cfg)
        nats = -logprobs * batch["weights"]
        stands_for = text_bytes[0, batch["targets"]]
        is_text = stands_for > 0
        num_bytes = jnp.where(is_text, stands_for - text_bytes[1, batch["tokens"]], 0)
        return stability | {
            "loss": Mean(nats.sum(), batch["weights"].sum()),
            "bits_per_byte": Mean(
                jnp.where(is_text, nats, 0).sum(), math.log(2) * (num_bytes * batch["weights"]).sum()
            ),
        }

    def parts(params: Params, text_bytes: jax.Array, batch: DeviceBatch) -> MetricSums:
        sums = lax.map(lambda piece: part(params, text_bytes, piece), batch)
        return jax.tree.map(lambda x: x.sum(axis=0), sums)

    return part if accumulation == 1 else parts


def _hidden_states(params: Params, cfg: Model, batch: DeviceBatch) -> jax.Array:
    return decoder.forward(params, cfg, batch["tokens"], _positions_of(batch), batch.get("segments"))


def _hidden_and_load(params: Params, cfg: Model, batch: DeviceBatch) -> tuple[jax.Array, experts.Load | None]:
    if cfg.experts is None:
        return _hidden_states(params, cfg, batch), None
    return decoder.forward_with_load(params, cfg, batch["tokens"], _positions_of(batch), batch.get("segments"))


def _positions_of(batch: DeviceBatch) -> jax.Array:
    positions, tokens = batch.get("positions"), batch["tokens"]
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions

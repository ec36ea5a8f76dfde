"""How far the residual connections are from what keeps a deep network stable, measured on a batch.

Rows and columns of each connection's matrix H should add up to 1. Its gain is the largest such sum: by rows how much an
activation can grow, by columns a gradient. The product over all layers is what lies between input and output; the share
of its diagonal is 1 if every stream keeps to itself and 1 / n if they have become one.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from conf.schema.training.model import Model
from trainer.models import decoder, residual
from trainer.models.decoder import is_local_layer
from trainer.models.weights import Params
from trainer.step.metric_sums import Mean, MetricSums


class _Walk(NamedTuple):
    """Carried from layer to layer; statistics are largest values so far, per token or scalar."""

    x: jax.Array
    product: jax.Array  # [n, n, ...]
    row_error: jax.Array
    column_error: jax.Array
    gain: jax.Array
    concentration: jax.Array


def forward(
    params: Params, cfg: Model, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None = None
) -> tuple[jax.Array, MetricSums]:
    """Return `decoder.forward`, and sums over tokens of what every connection of the batch did."""
    cfg = cfg.model_copy(update={"remat": "none"})  # the feed-forward block as a whole, which no loop hides
    attention = decoder.causal_attention(segments, cfg)
    first = decoder.embed(params, cfg, tokens, positions)

    def layer(i: int, walk: _Walk, weights: Params) -> _Walk:
        seen: list[residual.Mixing] = []

        def connect(branch: residual.Branch, x: jax.Array, weights: Params, name: str, cfg: Model) -> jax.Array:
            seen.append(residual.compute_mixing(x, weights, name, cfg))
            return residual.connect(branch, x, weights, name, cfg)

        local = is_local_layer(cfg, i)
        x = decoder.decoder_layer(walk.x, first, weights, cfg, positions, local, attention, connect)
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

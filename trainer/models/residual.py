"""Residual connections by `model.residual`: the sum, and forms that mix parallel streams or the channels.

mhc is https://arxiv.org/abs/2512.24880; mhc_lite replaces its Sinkhorn iterations by a convex sum of permutations,
which is exactly doubly stochastic; nash_hc is Nash-MHC's form (docs/nash-mhc.md). Streams lie side by side on the last
axis, [B, T, streams * D]: XLA would pad a short axis of their own to a whole tile.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn.initializers import constant, normal, ones

from conf.schema.training.model import Model
from trainer.distributed.mesh import constrain
from trainer.models.weights import Params, Weight

Branch = Callable[[jax.Array], jax.Array]
"""Attention or the feed-forward block, with its norms: [B, T, D] to [B, T, D]."""
Connection = Callable[[Branch, jax.Array, Params, str, Model], jax.Array]
"""Maps (branch, state, the layer's weights, the branch's name, model) to the state after the branch."""

DIAGONAL = 8.0
"""Initial logit of what stays in place: H is the identity within 1e-3 for four streams."""
INITIAL_SCALE = 0.01


class Mixing(NamedTuple):
    """Coefficients of one branch in float32. Tokens are on the last axes, because the first ones are short."""

    read: jax.Array | None  # [n, B, T]
    write: jax.Array | None  # [n, B, T]
    streams: jax.Array  # [n, n, B, T]: to, from; of nash_hc [D, D]


def num_streams(cfg: Model) -> int:
    return cfg.hyper.streams if cfg.residual in ("mhc", "mhc_lite") else 1


def split_streams(x: jax.Array, cfg: Model) -> jax.Array:
    """Return the state before the first layer, for embeddings [B, T, D]."""
    return x if num_streams(cfg) == 1 else jnp.tile(x, num_streams(cfg))


def merge_streams(x: jax.Array, cfg: Model) -> jax.Array:
    """Return the mean of the streams, [..., D]."""
    if num_streams(cfg) == 1:
        return x
    return x.reshape(*x.shape[:-1], num_streams(cfg), cfg.dim).astype(jnp.float32).mean(axis=-2).astype(x.dtype)


def connect(branch: Branch, x: jax.Array, weights: Params, name: str, cfg: Model) -> jax.Array:
    """Return the state after a branch."""
    if cfg.residual == "plain":
        return x + branch(x)
    mixing = compute_mixing(x, weights, name, cfg)
    if cfg.residual == "nash_hc":
        added = branch(x)
        mixed = jnp.matmul(x - added, mixing.streams.T.astype(x.dtype), preferred_element_type=jnp.float32)
        return ((added + mixed) * weights[f"{name}_layer_scale"]).astype(x.dtype)
    assert mixing.read is not None
    assert mixing.write is not None
    streams = [part.astype(jnp.float32) for part in jnp.split(x, len(mixing.streams), axis=-1)]
    added = branch(_weighted(mixing.read, streams).astype(x.dtype)).astype(jnp.float32)
    rows = zip(mixing.streams, mixing.write, strict=True)
    return jnp.concatenate(
        [(_weighted(row, streams) + write[..., None] * added).astype(x.dtype) for row, write in rows], axis=-1
    )


def _weighted(factors: jax.Array, parts: list[jax.Array]) -> jax.Array:
    """Return the sum of parts [B, T, D] with a factor per token each: as a product, it would waste the matrix unit."""
    return sum((factor[..., None] * part for factor, part in zip(factors, parts, strict=True)), start=jnp.zeros(()))


def compute_mixing(x: jax.Array, weights: Params, name: str, cfg: Model) -> Mixing:
    """Return the coefficients of a branch for the state x, in every form but plain."""
    if cfg.residual == "nash_hc":
        return Mixing(None, None, sinkhorn(weights[f"{name}_mixing_logits"], cfg.hyper.sinkhorn_iterations))
    n, wide = cfg.hyper.streams, x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + cfg.norm_eps)
    logits = jnp.matmul(x, weights[f"{name}_streams"].astype(x.dtype), preferred_element_type=jnp.float32) * scale
    logits = constrain(logits, "batch", None, None)
    sizes = (n, n, logits.shape[-1] - 2 * n)
    factors = jnp.concatenate([jnp.broadcast_to(a, s) for a, s in zip(weights[f"{name}_streams_scale"], sizes)])  # noqa: B905
    logits = jnp.moveaxis(logits * factors + weights[f"{name}_streams_bias"], -1, 0)
    read, write, rest = logits[:n], logits[n : 2 * n], logits[2 * n :]
    if cfg.residual == "mhc":
        streams = sinkhorn(rest.reshape(n, n, *rest.shape[1:]), cfg.hyper.sinkhorn_iterations)
    else:
        streams = jnp.einsum("kij,k...->ij...", permutations(n), jax.nn.softmax(rest, axis=0))
    return Mixing(jax.nn.sigmoid(read), 2 * jax.nn.sigmoid(write), streams)


def sinkhorn(logits: jax.Array, iterations: int) -> jax.Array:
    """Return exp(logits) [n, n, ...] with columns, then rows, divided by their sums, this many times; in float32."""

    def step(logits: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.nn.log_softmax(jax.nn.log_softmax(logits, axis=0), axis=1), None

    return jnp.exp(lax.scan(step, logits.astype(jnp.float32), length=iterations)[0])


def permutations(n: int) -> np.ndarray:
    """Return all permutation matrices, float32 [n!, n, n]; the first is the identity."""
    return np.eye(n, dtype=np.float32)[list(itertools.permutations(range(n)))]


def weight_entries(cfg: Model) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of one layer's two branches. At the start, the layer computes about what a plain one does."""
    if cfg.residual == "plain":
        return
    n, dim = cfg.hyper.streams, cfg.dim
    for name in ("attention", "mlp"):
        if cfg.residual == "nash_hc":
            kept = math.log((dim - 1) * (2 * cfg.num_layers - 1)) if cfg.hyper.init_diag else 0.0
            yield f"{name}_mixing_logits", Weight((dim, dim), ("embed", None), constant(kept * np.eye(dim)))
            yield f"{name}_layer_scale", Weight((dim,), ("embed",), ones)
            continue
        kept = np.eye(n).ravel() if cfg.residual == "mhc" else np.eye(1, math.factorial(n))[0]
        bias = np.concatenate([np.full(n, -math.log(n - 1)), np.zeros(n), DIAGONAL * kept])
        size = len(bias)
        yield f"{name}_streams", Weight((n * dim, size), ("embed", None), normal((n * dim) ** -0.5))
        yield f"{name}_streams_bias", Weight((size,), (None,), constant(bias))
        yield f"{name}_streams_scale", Weight((3,), (None,), constant(INITIAL_SCALE))

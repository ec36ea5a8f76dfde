"""Attention at several resolutions: MAHA (https://arxiv.org/abs/2512.14925), made causal (docs/nash-mhc.md).

Scale l has a token for 2^l positions. Position t reads token floor(t / 2^l) of it, which has seen the positions up to
2^l floor(t / 2^l) only.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer, normal, zeros

from conf.schema.training.model import Model
from trainer.distributed.mesh import constrain
from trainer.models.layers import linear
from trainer.models.weights import Params, Weight

OneScale = Callable[[jax.Array, Params, jax.Array, jax.Array | None], jax.Array]
"""Maps (input [B, T, D], weights, positions [B, T], value [B, T, heads, head_dim]) to attention's output, [B, T, D]."""


def attend(x: jax.Array, weights: Params, positions: jax.Array, cfg: Model, one_scale: OneScale) -> jax.Array:
    """Return the weighted sum of what attention finds at each scale, [B, T, D], for normalized inputs [B, T, D].

    Scales have their own queries and keys; the value and the output projection are shared.
    """
    length, value = x.shape[1], linear(x, weights["value"])
    found, heads = [one_scale(x, weights, positions, None)], value.shape[2:]
    value = value.reshape(x.shape)
    for scale in range(1, cfg.maha.scales):
        kernel = weights[f"downsample_{scale}"]
        x, value = _downsample(x, kernel), _downsample(value, kernel)
        own = weights | {name: weights[f"{name}_{scale}"] for name in ("query", "key")}
        by_head = constrain(value.reshape(*value.shape[:2], *heads), "batch", None, "kv_heads", None)
        out = one_scale(x, own, positions[:, :: 2**scale], checkpoint_name(by_head, "attention"))
        found.append(jnp.repeat(out, 2**scale, axis=1)[:, :length])
    return _weighted_sum(jnp.stack(found), scale_weights(jnp.stack(found), weights, cfg)).astype(x.dtype)


def _downsample(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return a convolution of width 3 and stride 2, [B, ceil(T / 2), D]; kernel: [3 D, D].

    The window ends at the position: with one position of it on the right, as published, a token would see the next one.
    """
    even, odd = x[:, ::2], x[:, 1::2]

    def before(part: jax.Array) -> jax.Array:
        return jnp.pad(part, ((0, 0), (1, 0), (0, 0)))[:, : even.shape[1]]

    out = linear(jnp.concatenate([before(even), before(odd), even], axis=-1), kernel)
    return constrain(checkpoint_name(out, "product"), "batch", None, None)


def scale_weights(found: jax.Array, weights: Params, cfg: Model) -> jax.Array:
    """Return the scales' weights, float32, for their outputs [L, B, T, D]: [L, B, T] or, if learned, [L, 1, 1].

    A best response is the softmax of minus the distances to the weighted sum, of this position only: over the whole
    sequence, as published, it would depend on the future. No gradient passes through it.
    """
    if cfg.maha.aggregation == "convex":
        return jax.nn.softmax(weights["scale_logits"])[:, None, None]
    wide = lax.stop_gradient(found).astype(jnp.float32)
    shares = jnp.full(found.shape[:3], 1 / len(found), jnp.float32)
    for _ in range(cfg.maha.nash_iterations):
        distance = wide - _weighted_sum(wide, shares)
        shares = jax.nn.softmax(-jnp.sqrt(jnp.sum(distance * distance, axis=-1) + 1e-8), axis=0)
    return shares


def _weighted_sum(found: jax.Array, shares: jax.Array) -> jax.Array:
    return jnp.sum(shares[..., None] * found.astype(jnp.float32), axis=0)


def weight_entries(cfg: Model, by_dim: Initializer) -> Iterator[tuple[str, Weight]]:
    """Yield what a layer has beside the weights of scale 0."""
    if cfg.attention_form == "causal":
        return
    for scale in range(1, cfg.maha.scales):
        for name, heads, axis in (("query", cfg.num_heads, "heads"), ("key", cfg.num_kv_heads, "kv_heads")):
            yield f"{name}_{scale}", Weight((cfg.dim, heads, cfg.head_dim), ("embed", axis, "head_dim"), by_dim)
        shape = (3 * cfg.dim, cfg.dim)
        yield f"downsample_{scale}", Weight(shape, ("embed", "hidden"), normal(shape[0] ** -0.5))
    if cfg.maha.aggregation == "convex":
        yield "scale_logits", Weight((cfg.maha.scales,), (None,), zeros)


def sparsity_penalty(cfg: Model) -> float:
    """Return the published penalty of all layers: its factor times the sum of learned weights, which is always 1."""
    learned = cfg.attention_form == "maha" and cfg.maha.aggregation == "convex"
    return cfg.maha.sparsity * cfg.num_layers if learned else 0.0


def uses_per_token(cfg: Model) -> dict[str, float]:
    """Return how often a token multiplies with a layer's matrix, where that is not once."""
    if cfg.attention_form == "causal":
        return {}
    sizes = [0.5**scale for scale in range(cfg.maha.scales)]
    uses = {"output": sum(sizes)}
    for scale, size in enumerate(sizes[1:], 1):
        uses |= {f"query_{scale}": size, f"key_{scale}": size, f"downsample_{scale}": 2 * size}
    return uses

"""The tiny recursive model (https://arxiv.org/abs/2510.04871): plain functions, configured by `Trm`.

One net of a few layers updates two states in turn: z_L, n times, from z_L + (z_H + x), then z_H from z_H + z_L. The
weights of its layers are stacked on a leading axis.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer, constant, truncated_normal, zeros

from conf.schema.training.loop_parts import Trm
from trainer.distributed import mesh as meshes
from trainer.models.layers import apply_rope, linear
from trainer.models.weights import Params, Weight

TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a normal distribution that is cut off at two standard deviations."""


def weight_table(cfg: Trm) -> Params:
    """Return the tree of every `Weight`. The initial states are constants; the puzzle embedding is no parameter."""
    initial = Weight((cfg.dim,), (None,), _normal(1), trained=False, counted=False)
    table = {
        "embedding": Weight((cfg.vocab_size, cfg.dim), ("vocab", "embed"), _normal(cfg.dim)),
        "initial_h": initial,
        "initial_l": initial,
        "layers": {
            name: Weight((cfg.num_layers, *w.shape), ("layers", *w.axes), w.init)
            for name, w in [*_mixer_weights(cfg), *_swiglu(cfg, cfg.dim, "embed", "")]
        },
        "unembedding": Weight((cfg.vocab_size, cfg.dim), ("vocab", "embed"), _normal(cfg.dim)),
        "halt": Weight((cfg.dim, 2), ("embed", None), zeros),
        "halt_bias": Weight((2,), (None,), constant(-5.0)),
    }
    if cfg.puzzle_width:
        shape = (cfg.num_identifiers, cfg.puzzle_width)
        table["puzzle_embedding"] = Weight(shape, (None, None), zeros, counted=False)
    if cfg.position_embedding == "learned":
        table["position_embedding"] = Weight((cfg.length, cfg.dim), (None, "embed"), _normal(cfg.dim))
    return table


def _mixer_weights(cfg: Trm) -> Iterator[tuple[str, Weight]]:
    if cfg.mixer == "mlp":
        yield from _swiglu(cfg, cfg.length, None, "mixer_")
        return
    shape, axes = (cfg.dim, cfg.num_heads, cfg.dim // cfg.num_heads), ("embed", "heads", "head_dim")
    for name in ("query", "key", "value"):
        yield name, Weight(shape, axes, _normal(cfg.dim))
    yield "output", Weight((*shape[1:], cfg.dim), (*axes[1:], "embed"), _normal(cfg.dim))


def _swiglu(cfg: Trm, size: int, axis: str | None, prefix: str) -> Iterator[tuple[str, Weight]]:
    inner = cfg.inner_width(size)
    for name in ("gate", "up"):
        yield prefix + name, Weight((size, inner), (axis, "hidden"), _normal(size))
    yield f"{prefix}down", Weight((inner, size), ("hidden", axis), _normal(inner))


def _normal(fan_in: int) -> Initializer:
    """Return a normal distribution of variance 1 / fan_in, cut off at two standard deviations of the uncut one."""
    return truncated_normal(fan_in**-0.5 / TRUNCATED_STD)


REMAT_SAVED_NAMES = {"outputs": ("output",), "full": ()}


class Latents(NamedTuple):
    """The two states, [B, length, dim] in the activation dtype."""

    h: Any
    l: Any  # noqa: E741 - its name in the paper


def initial_latents(params: Params, cfg: Trm) -> Latents:
    """Return the states of a new puzzle, [dim] each. They are constants: nothing trains them."""
    dtype = jnp.dtype(cfg.activation_dtype)
    return Latents(*(lax.stop_gradient(params[name].astype(dtype)) for name in ("initial_h", "initial_l")))


def embed(params: Params, cfg: Trm, tokens: jax.Array, ids: jax.Array) -> jax.Array:
    """Return x, [B, length, dim], of tokens [B, cells] and puzzle identifiers [B]."""
    dtype = jnp.dtype(cfg.activation_dtype)
    x = params["embedding"].astype(dtype)[tokens]
    if cfg.puzzle_width:
        rows = params["puzzle_embedding"].astype(dtype)[ids]
        rows = jnp.pad(rows, ((0, 0), (0, cfg.puzzle_len * cfg.dim - cfg.puzzle_width)))
        x = jnp.concatenate([rows.reshape(-1, cfg.puzzle_len, cfg.dim), x], axis=1)
    if cfg.position_embedding == "learned":
        x = 0.5**0.5 * (x + params["position_embedding"].astype(dtype))  # keeps the variance
    return meshes.constrain((cfg.dim**0.5 * x).astype(dtype), "batch", None, None)


def recurse(params: Params, cfg: Trm, latents: Latents, x: jax.Array) -> Latents:
    """Return the states after T cycles. Only the last one has gradients."""
    weights = jax.tree.map(lambda w: w.astype(cfg.activation_dtype), params["layers"])
    layers = [{name: w[i] for name, w in weights.items()} for i in range(cfg.num_layers)]
    latents, x = _positions_first((latents, x), cfg)
    fixed = lax.stop_gradient((layers, x))
    if cfg.h_cycles > 1:
        latents, _ = lax.scan(lambda z, _: (_cycle(*fixed, cfg, z), None), latents, length=cfg.h_cycles - 1)
    return _positions_first(_cycle(layers, x, cfg, lax.stop_gradient(latents)), cfg)


def _positions_first(tree: Any, cfg: Trm) -> Any:
    """Swap the first two axes, batch and length, for the mixer: its products then need no transposed copies."""
    return jax.tree.map(lambda z: z.swapaxes(0, 1), tree) if cfg.mixer == "mlp" else tree


def _cycle(layers: Sequence[Params], x: jax.Array, cfg: Trm, z: Latents) -> Latents:
    """Update z_L n times, then z_H."""

    def call(layers: Sequence[Params], z: jax.Array, injected: jax.Array) -> jax.Array:
        return net(layers, cfg, z, injected)

    if cfg.remat in REMAT_SAVED_NAMES:
        kept = jax.checkpoint_policies.save_only_these_names(*REMAT_SAVED_NAMES[cfg.remat])
        call = jax.checkpoint(call, policy=kept)
    injected = z.h + x
    inner, _ = lax.scan(lambda inner, _: (call(layers, inner, injected), None), z.l, length=cfg.l_cycles)
    return Latents(call(layers, z.h, inner), inner)


def net(layers: Sequence[Params], cfg: Trm, z: jax.Array, injected: jax.Array) -> jax.Array:
    """Apply the layers to z + injected: [B, length, dim], or with the mixer [length, B, dim]."""
    z = z + injected
    for w in layers:
        if cfg.mixer == "mlp":
            z = feed_forward(z, w["mixer_gate"], w["mixer_up"], w["mixer_down"], 0, cfg.norm_eps)
        else:
            added = z + attend(w, cfg, z)
            z = (added * inverse_rms(added, -1, cfg.norm_eps)).astype(z.dtype)
        z = feed_forward(z, w["gate"], w["up"], w["down"], -1, cfg.norm_eps)
    return z


def heads(params: Params, cfg: Trm, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return float32 logits of the cells, [B, cells, vocab], and of halting, [B]."""
    logits = h[:, cfg.length - cfg.seq_len :] @ params["unembedding"].astype(h.dtype).T
    halt = h[:, 0] @ params["halt"].astype(h.dtype) + params["halt_bias"].astype(h.dtype)
    return logits.astype(jnp.float32), halt[:, 0].astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def feed_forward(z: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, axis: int, eps: float) -> jax.Array:
    """Return the norm, without a gain, of z plus a SwiGLU of z, both over its first (0) or last (-1) axis.

    The gradients are written out: JAX would keep two and a half times as many bytes for them.
    """
    return _feed_forward(z, gate, up, down, axis, eps)[0]


def _feed_forward(z: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, axis: int, eps: float) -> Any:
    gated, straight = (_product(_matrix(z, axis), w, axis) for w in (gate, up))
    added = checkpoint_name(_product(jax.nn.silu(gated) * straight, down, axis), "output").reshape(z.shape)
    scale = inverse_rms(z + added, axis, eps)
    out = ((z + added) * scale).astype(z.dtype)
    return out, (z, (gate, up, down), gated, straight, scale, out)


def _feed_forward_gradients(axis: int, eps: float, kept: Any, change: jax.Array) -> tuple[jax.Array, ...]:
    del eps
    z, (gate, up, down), gated, straight, scale, out = kept
    change, normed = change.astype(jnp.float32), out.astype(jnp.float32)
    change = (scale * (change - normed * jnp.mean(change * normed, axis, keepdims=True))).astype(z.dtype)
    x, of_added = _matrix(z, axis), _matrix(change, axis)
    of_inner = _product(of_added, down.T, axis).astype(jnp.float32)
    share, gated, straight = (y.astype(jnp.float32) for y in (jax.nn.sigmoid(gated), gated, straight))
    inner = (gated * share * straight).astype(z.dtype)
    of_straight = (of_inner * gated * share).astype(z.dtype)
    of_gated = (of_inner * straight * share * (1 + gated * (1 - share))).astype(z.dtype)
    of_x = _product(of_gated, gate.T, axis) + _product(of_straight, up.T, axis)
    return (
        change + of_x.reshape(z.shape),
        _weight_gradient(x, of_gated, axis),
        _weight_gradient(x, of_straight, axis),
        _weight_gradient(inner, of_added, axis),
    )


feed_forward.defvjp(_feed_forward, _feed_forward_gradients)


def inverse_rms(x: jax.Array, axis: int, eps: float) -> jax.Array:
    """Return what x is multiplied by to normalize it, in float32."""
    return lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis, keepdims=True) + eps)


def _matrix(x: jax.Array, axis: int) -> jax.Array:
    """Merge all axes except this one, the first (0) or the last (-1)."""
    return x.reshape(x.shape[0], -1) if axis == 0 else x.reshape(-1, x.shape[-1])


def _product(x: jax.Array, weight: jax.Array, axis: int) -> jax.Array:
    """Multiply the columns (0) or the rows (-1) of a matrix by a weight [inputs, outputs]."""
    return weight.T @ x if axis == 0 else x @ weight


def _weight_gradient(x: jax.Array, change: jax.Array, axis: int) -> jax.Array:
    """Return the gradient of the weight of a `_product` of x, from the change of the product."""
    summed = 1 if axis == 0 else 0
    inputs, outputs = x.shape[1 - summed], change.shape[1 - summed]
    if jax.default_backend() == "cpu" and (inputs < outputs) == (axis == 0):
        # XLA on CPU sums over rows faster to a wide matrix, and over columns to a tall one
        turned = lax.dot_general(change, x, (((summed,), (summed,)), ((), ())))
        return lax.optimization_barrier(turned).T  # else XLA would merge the transposition into the product
    return lax.dot_general(x, change, (((summed,), (summed,)), ((), ())))


def attend(w: Params, cfg: Trm, z: jax.Array) -> jax.Array:
    """Return the output of attention from every position to every position."""
    query, key, value = (linear(z, w[name]) for name in ("query", "key", "value"))
    if cfg.position_embedding == "rope":
        query, key = _rotated(query, cfg), _rotated(key, cfg)
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key, preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1).astype(z.dtype)
    mixed = jnp.einsum("bhqs,bshk->bqhk", shares, value)
    joined = mixed.reshape(*mixed.shape[:2], -1)
    return checkpoint_name(linear(joined, w["output"].reshape(joined.shape[-1], -1)), "output")


def _rotated(x: jax.Array, cfg: Trm) -> jax.Array:
    half = x.shape[-1] // 2
    frequencies = cfg.rope_theta ** -(np.arange(half, dtype=np.float32) / half)
    return apply_rope(x.astype(jnp.float32), jnp.arange(x.shape[1])[None], frequencies).astype(x.dtype)

"""The tiny recursive model (https://arxiv.org/abs/2510.04871): plain functions, configured by `Trm`.

One net of a few layers updates two states in turn: z_L, n times, from z_L + (z_H + x), then z_H from z_H + z_L.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from conf.schema.training.trm import Trm
from trainer.distributed import mesh as meshes
from trainer.models.layers import apply_rope, linear
from trainer.models.weights import Params

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
    layers = jax.tree.map(lambda w: w.astype(cfg.activation_dtype), params["layers"])
    fixed = lax.stop_gradient((layers, x))
    if cfg.h_cycles > 1:
        latents, _ = lax.scan(lambda z, _: (_cycle(*fixed, cfg, z), None), latents, length=cfg.h_cycles - 1)
    return _cycle(layers, x, cfg, lax.stop_gradient(latents))


def _cycle(layers: Params, x: jax.Array, cfg: Trm, z: Latents) -> Latents:
    """Update z_L n times, then z_H."""

    def call(layers: Params, z: jax.Array, injected: jax.Array) -> jax.Array:
        return net(layers, cfg, z, injected)

    if cfg.remat in REMAT_SAVED_NAMES:
        kept = jax.checkpoint_policies.save_only_these_names(*REMAT_SAVED_NAMES[cfg.remat])
        call = jax.checkpoint(call, policy=kept)
    injected = z.h + x
    inner, _ = lax.scan(lambda inner, _: (call(layers, inner, injected), None), z.l, length=cfg.l_cycles)
    return Latents(call(layers, z.h, inner), inner)


def net(layers: Params, cfg: Trm, z: jax.Array, injected: jax.Array) -> jax.Array:
    """Apply the layers to z + injected."""
    z = z + injected
    for i in range(cfg.num_layers):
        w = {name: weight[i] for name, weight in layers.items()}
        if cfg.mixer == "mlp":
            across = z.swapaxes(1, 2)
            mixed = swiglu(across, w["mixer_gate"], w["mixer_up"], w["mixer_down"])
            z = rms(across + mixed, cfg).swapaxes(1, 2)
        else:
            z = rms(z + attend(w, cfg, z), cfg)
        z = rms(z + swiglu(z, w["gate"], w["up"], w["down"]), cfg)
    return z


def heads(params: Params, cfg: Trm, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return float32 logits of the cells, [B, cells, vocab], and of halting, [B]."""
    logits = h[:, cfg.length - cfg.seq_len :] @ params["unembedding"].astype(h.dtype).T
    halt = h[:, 0] @ params["halt"].astype(h.dtype) + params["halt_bias"].astype(h.dtype)
    return logits.astype(jnp.float32), halt[:, 0].astype(jnp.float32)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return checkpoint_name(linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down), "output")


def rms(x: jax.Array, cfg: Trm) -> jax.Array:
    """Normalize the last axis in float32, without a gain."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + cfg.norm_eps)).astype(x.dtype)


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

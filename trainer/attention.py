"""Attention: grouped queries, rotary positions, soft-capped logits. Plain einsums: the reference for faster paths."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), the two halves of a head as pairs.

    x: [B, T, heads, head_dim]; positions: [B, T] integers. Same shape and type out; angles are float32.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def soft_cap(logits: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap), so that no logit leaves +- cap; None: as they are."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, cap: float | None) -> jax.Array:
    """Softmax attention, in float32 between the two products.

    query: [B, T, heads, head_dim], already scaled; key, value: [B, S, kv_heads, head_dim]; mask: [B, T, S], True where
    a token may look. Each key head serves heads / kv_heads neighbouring query heads. Returns [B, T, heads, head_dim].
    """
    batch, length, heads, head_dim = query.shape
    grouped = query.reshape(batch, length, key.shape[2], heads // key.shape[2], head_dim)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    logits = jnp.where(mask[:, None, None], soft_cap(logits, cap), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)

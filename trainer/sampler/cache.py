"""Keys and values of the tokens that rows in slots have seen.

Every layer has a ring: as long as prompt and response, or as the window of a local layer. All rows write their newest
token to the same place, that of the decoding step: one slice in place, instead of a scatter by each row's own position.
Where older tokens of a row lie follows from how long ago they were written, so that its prompt is turned to the step at
which the row begins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.models.attention import soft_cap
from trainer.models.decoder import is_local_layer

CACHE_AXES = ("batch", "kv_heads", None, None)
PREFILL_AXES = (None, "kv_heads", None, None)
"""Logical axes of the arrays, and of those of prompts, which every device that has other rows holds."""


class KVCache(NamedTuple):
    """One array [slots, kv_heads, places, head_dim] per layer, or in its place its partition."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]


def ring_size(cfg: Model, layer: int, length: int) -> int:
    """Tokens that a layer's ring holds, of rows of at most `length` tokens."""
    return min(cfg.sliding_window, length) if is_local_layer(cfg, layer) else length


def init_cache(cfg: Model, slots: int, length: int) -> KVCache:
    """For rows of at most `length` tokens, prompt and response, in the type of the activations."""

    def rings() -> tuple[jax.Array, ...]:
        shapes = [(slots, cfg.num_kv_heads, ring_size(cfg, i, length), cfg.head_dim) for i in range(cfg.num_layers)]
        return tuple(meshes.constrain(jnp.zeros(shape, cfg.activation_dtype), *CACHE_AXES) for shape in shapes)

    return KVCache(rings(), rings())


def insert_prompts(cache: KVCache, prompts: KVCache, source: jax.Array, lengths: jax.Array, step: jax.Array) -> KVCache:
    """The cache with prompts in some of the slots, whose rows begin at `step`.

    prompts: arrays [P, kv_heads, bucket, head_dim] by position; source: int32 [slots], the prompt of each slot, below 0
    where it keeps what it has; lengths: int32 [slots], of the slots' prompts.
    """

    def admitted(ring: jax.Array, prompt: jax.Array) -> jax.Array:
        taken = jax.vmap(lambda p, length: _to_ring(prompt[p], length, step, ring.shape[2]))
        new = taken(jnp.maximum(source, 0), lengths)
        return meshes.constrain(jnp.where((source >= 0)[:, None, None, None], new, ring), *CACHE_AXES)

    return KVCache(*(tuple(map(admitted, *pair)) for pair in zip(cache, prompts, strict=True)))


def _to_ring(prompt: jax.Array, length: jax.Array, step: jax.Array, size: int) -> jax.Array:
    """A prompt [kv_heads, bucket, head_dim] as a ring of `size` places, its last token written just before `step`."""
    bucket = prompt.shape[1]
    first = jnp.maximum(length - size, 0)  # the oldest position that the ring holds
    if bucket < size:
        prompt = jnp.pad(prompt, ((0, 0), (0, size - bucket), (0, 0)))
    held = lax.dynamic_slice_in_dim(prompt, first, size, axis=1)
    turn = (length - first - step) % size
    return lax.dynamic_slice_in_dim(jnp.concatenate([held, held], axis=1), turn, size, axis=1)


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rings: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    step: jax.Array,
    cfg: Model,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The newest token of each row attends to what its rings hold, itself included.

    query: [slots, 1, heads, head_dim], scaled; key, value: [slots, 1, kv_heads, head_dim]; rings: keys and values;
    positions: int32 [slots], of the newest tokens. Returns [slots, 1, heads, head_dim] and the rings with the tokens.
    """
    slots, _, heads, head_dim = query.shape
    size, kv_heads = rings[0].shape[2], key.shape[2]
    at = step % size
    keys, values = (
        lax.dynamic_update_slice_in_dim(ring, new.swapaxes(1, 2).astype(ring.dtype), at, axis=2)
        for ring, new in zip(rings, (key, value), strict=True)
    )
    age = (step - jnp.arange(size)) % size  # of what lies in each place, if the row has lived so long
    seen = age <= positions[:, None]
    grouped = query.reshape(slots, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("bkgh,bksh->bkgs", grouped, keys, preferred_element_type=jnp.float32)
    logits = jnp.where(seen[:, None, None], soft_cap(logits, cfg.attn_logit_softcap), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bkgs,bksh->bkgh", weights, values).reshape(query.shape)
    return mixed, (keys, values)

"""The key-value cache of the rows in slots.

Every layer has a ring buffer, as long as prompt and response, or as the window of a local layer. All rows write their
newest token to the same place, given by the decoding step: one in-place slice instead of a scatter by row position. The
age of a token gives its place, so a prompt is rotated to the step at which its row begins.

Every token reads whole rings, so they are only as long as the rows in flight need, and are resized between chunks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.models.attention import soft_cap
from trainer.models.decoder import is_local_layer

CACHE_AXES = ("batch", "kv_heads", None, None)
PREFILL_AXES = (None, "kv_heads", None, None)
"""Logical axes of the prompts' arrays, which are replicated over the devices that hold different rows."""


class KVCache(NamedTuple):
    """One array [slots, kv_heads, places, head_dim] per layer, or its partition."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]


def ring_size(cfg: Model, layer: int, length: int) -> int:
    """Return the tokens that a layer's ring buffer holds, for rows of at most `length` tokens."""
    return min(cfg.sliding_window, length) if is_local_layer(cfg, layer) else length


def init_cache(cfg: Model, slots: int, length: int) -> KVCache:
    """Return an empty cache for rows of at most `length` tokens, prompt and response, in the activation dtype."""

    def rings() -> tuple[jax.Array, ...]:
        shapes = [(slots, cfg.num_kv_heads, ring_size(cfg, i, length), cfg.head_dim) for i in range(cfg.num_layers)]
        return tuple(meshes.constrain(jnp.zeros(shape, cfg.activation_dtype), *CACHE_AXES) for shape in shapes)

    return KVCache(rings(), rings())


def insert_prompts(cache: KVCache, prompts: KVCache, source: jax.Array, lengths: jax.Array, step: jax.Array) -> KVCache:
    """Insert prompts into some of the slots, whose rows begin at `step`.

    prompts: arrays [P, kv_heads, bucket, head_dim] by position; source: int32 [slots], each slot's prompt, negative to
    keep the slot as it is; lengths: int32 [slots], of the slots' prompts.
    """

    def admitted(ring: jax.Array, prompt: jax.Array) -> jax.Array:
        taken = jax.vmap(lambda p, length: _to_ring(prompt[p], length, step, ring.shape[2]))
        new = taken(jnp.maximum(source, 0), lengths)
        return meshes.constrain(jnp.where((source >= 0)[:, None, None, None], new, ring), *CACHE_AXES)

    return KVCache(*(tuple(map(admitted, *pair)) for pair in zip(cache, prompts, strict=True)))


def resize(cache: KVCache, cfg: Model, length: int, step: jax.Array) -> KVCache:
    """Return the cache with rings for rows of at most `length` tokens; the newest token was written before `step`."""

    def resized(ring: jax.Array, size: int) -> jax.Array:
        old = ring.shape[2]
        if old == size:
            return ring

        def moved(row: jax.Array) -> jax.Array:
            by_age = lax.dynamic_slice_in_dim(jnp.concatenate([row, row], axis=1), step % old, old, axis=1)
            return _to_ring(by_age, jnp.int32(old), step, size)

        return meshes.constrain(jax.vmap(moved)(ring), *CACHE_AXES)

    sizes = [ring_size(cfg, layer, length) for layer in range(cfg.num_layers)]
    return KVCache(*(tuple(map(resized, rings, sizes)) for rings in cache))


def _to_ring(prompt: jax.Array, length: jax.Array, step: jax.Array, size: int) -> jax.Array:
    """Return a prompt [kv_heads, bucket, head_dim] as a ring of `size` places that ends just before `step`."""
    bucket = prompt.shape[1]
    first = jnp.maximum(length - size, 0)  # the oldest position in the ring
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
    """Attend from each row's newest token to its ring buffer, including the token itself.

    query: [slots, 1, heads, head_dim], scaled; key, value: [slots, 1, kv_heads, head_dim]; rings: keys and values;
    positions: int32 [slots], of the newest tokens. Returns [slots, 1, heads, head_dim] and the updated rings.
    """
    slots, _, heads, head_dim = query.shape
    size, kv_heads = rings[0].shape[2], key.shape[2]
    at = step % size
    keys, values = (
        lax.dynamic_update_slice_in_dim(ring, new.swapaxes(1, 2).astype(ring.dtype), at, axis=2)
        for ring, new in zip(rings, (key, value), strict=True)
    )
    age = (step - jnp.arange(size)) % size  # age of each place's token, if the row is that old
    seen = age <= positions[:, None]
    grouped = query.reshape(slots, kv_heads, heads // kv_heads, head_dim)
    logits = lax.platform_dependent(grouped, keys, cpu=_scores_on_cpu, default=_scores)
    logits = jnp.where(seen[:, None, None], soft_cap(logits, cfg.attn_logit_softcap), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bkgs,bksh->bkgh", weights, values).reshape(query.shape)
    return mixed, (keys, values)


def _scores(query: jax.Array, keys: jax.Array) -> jax.Array:
    """Multiply queries [slots, kv_heads, group, head_dim] by keys: float32 [slots, kv_heads, group, places]."""
    return jnp.einsum("bkgh,bksh->bkgs", query, keys, preferred_element_type=jnp.float32)


def _scores_on_cpu(query: jax.Array, keys: jax.Array) -> jax.Array:
    """Return what `_scores` does. XLA on CPU would turn all keys around for that; here it turns the query."""
    if set(jax.sharding.get_abstract_mesh().axis_types) != {AxisType.Manual}:
        return _scores(query, keys)  # to merge their axes, the partitioner would gather the keys
    slots, kv_heads, group, head_dim = query.shape
    query = query.reshape(slots * kv_heads, group, head_dim).swapaxes(1, 2)
    keys = keys.reshape(slots * kv_heads, -1, head_dim)
    logits = lax.dot_general(keys, query, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return logits.swapaxes(1, 2).reshape(slots, kv_heads, group, -1)

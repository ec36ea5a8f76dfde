"""The key-value cache of the rows in slots.

Every layer has a ring buffer, as long as prompt and response, or as the window of a local layer. All rows write their
newest token to the same place, given by the decoding step: one in-place slice instead of a scatter by row position. The
age of a token gives its place, so a prompt is rotated to the step at which its row begins.

Every token reads whole rings, so they are only as long as the rows in flight need, and are resized between chunks.
Recurrent layers have a memory of one size instead.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.layer_kinds import layer_kind, layer_kinds, sized
from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.models.attention import attention_weights, soft_cap
from trainer.models.delta_net import Memory, empty_memory

CACHE_AXES = ("batch", "kv_heads", None, None)
PREFILL_AXES = (None, "kv_heads", None, None)
"""Logical axes of the prompts' arrays, which are replicated over the devices that hold different rows."""


class KVCache(NamedTuple):
    """One array per layer that has keys, or its partition, and one `Memory` per recurrent layer.

    Keys on CPU are [slots, kv_heads, head_dim, places], see `places_axes`; all others [slots, kv_heads, places,
    head_dim].
    """

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    memories: tuple[Memory, ...] = ()


def places_axes() -> tuple[int, int]:
    """Return the axes of the places in keys and values for the devices of the mesh in context.

    XLA on CPU would turn all keys around for each token if they were not as it multiplies them. The TPU compiler
    chooses layouts by itself.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (3, 2) if device is not None and device.device_kind == "cpu" else (2, 2)


def ring_size(cfg: Model, layer: int, length: int) -> int:
    """Return the tokens that a layer's ring buffer holds, for rows of at most `length` tokens."""
    return min(cfg.sliding_window, length) if layer_kind(cfg, layer).is_local else length


def layers_with_rings(cfg: Model) -> list[int]:
    """Return the layers that have keys and values of their own."""
    return [i for i, kind in enumerate(layer_kinds(cfg)) if not kind.shares and not kind.is_recurrent]


def recurrent_layers(cfg: Model) -> list[int]:
    return [i for i, kind in enumerate(layer_kinds(cfg)) if kind.is_recurrent]


def memory_axes(rows: str | None) -> Memory:
    """Return the logical axes of a memory's arrays; rows: that of the first one, as in CACHE_AXES or PREFILL_AXES."""
    keys, values = (rows, None, "kv_heads", None), (rows, None, "heads", None)
    return Memory((keys, keys, values), (rows, "heads", None, None))


def init_cache(cfg: Model, slots: int, length: int) -> KVCache:
    """Return an empty cache for rows of at most `length` tokens, prompt and response, in the activation dtype."""

    def rings(axis: int) -> tuple[jax.Array, ...]:
        shapes = []
        for layer in layers_with_rings(cfg):
            own, size = sized(cfg, layer_kind(cfg, layer)), ring_size(cfg, layer, length)
            shapes.append((slots, own.num_kv_heads, *((size, own.head_dim) if axis == 2 else (own.head_dim, size))))
        return tuple(meshes.constrain(jnp.zeros(shape, cfg.activation_dtype), *CACHE_AXES) for shape in shapes)

    empty = [empty_memory(cfg.delta_net, slots, cfg.activation_dtype) for _ in recurrent_layers(cfg) if cfg.delta_net]
    keys, values = map(rings, places_axes())
    return KVCache(keys, values, tuple(map(_placed, empty)))


def _placed(memory: Memory) -> Memory:
    axes = memory_axes("batch")
    recent = tuple(meshes.constrain(x, *named) for x, named in zip(memory.recent, axes.recent, strict=True))
    return Memory(recent, meshes.constrain(memory.state, *axes.state))


def insert_prompts(cache: KVCache, prompts: KVCache, source: jax.Array, lengths: jax.Array, step: jax.Array) -> KVCache:
    """Insert prompts into some of the slots, whose rows begin at `step`.

    prompts: arrays by position instead of place, with prompts instead of slots; source: int32 [slots], each slot's
    prompt, negative to keep the slot as it is; lengths: int32 [slots], of the slots' prompts.
    """

    def admitted(axis: int, ring: jax.Array, prompt: jax.Array) -> jax.Array:
        taken = jax.vmap(lambda p, length: _to_ring(prompt[p], length, step, ring.shape[axis], axis - 1))
        new = taken(jnp.maximum(source, 0), lengths)
        return meshes.constrain(jnp.where((source >= 0)[:, None, None, None], new, ring), *CACHE_AXES)

    def taken(old: jax.Array, prompt: jax.Array) -> jax.Array:
        return jnp.where((source >= 0)[:, None, None, None], prompt[jnp.maximum(source, 0)].astype(old.dtype), old)

    parts = zip(places_axes(), cache[:2], prompts[:2], strict=True)
    memories = jax.tree.map(taken, cache.memories, prompts.memories)
    keys, values = (tuple(map(partial(admitted, axis), rings, new)) for axis, rings, new in parts)
    return KVCache(keys, values, tuple(map(_placed, memories)))


def resize(cache: KVCache, cfg: Model, length: int, step: jax.Array) -> KVCache:
    """Return the cache with rings for rows of at most `length` tokens; the newest token was written before `step`."""

    def resized(axis: int, ring: jax.Array, size: int) -> jax.Array:
        old = ring.shape[axis]
        if old == size:
            return ring

        def moved(row: jax.Array) -> jax.Array:
            by_age = _turned(row, step % old, axis - 1)
            return _to_ring(by_age, jnp.int32(old), step, size, axis - 1)

        return meshes.constrain(jax.vmap(moved)(ring), *CACHE_AXES)

    sizes = [ring_size(cfg, layer, length) for layer in layers_with_rings(cfg)]
    parts = zip(places_axes(), cache[:2], strict=True)
    keys, values = (tuple(map(partial(resized, axis), rings, sizes)) for axis, rings in parts)
    return KVCache(keys, values, cache.memories)


def _to_ring(prompt: jax.Array, length: jax.Array, step: jax.Array, size: int, axis: int) -> jax.Array:
    """Return the keys or values of a prompt, by position along `axis`, as a ring of places that ends before `step`."""
    bucket = prompt.shape[axis]
    first = jnp.maximum(length - size, 0)  # the oldest position in the ring
    if bucket < size:
        prompt = jnp.pad(prompt, [(0, size - bucket if i == axis else 0) for i in range(prompt.ndim)])
    held = lax.dynamic_slice_in_dim(prompt, first, size, axis)
    return _turned(held, (length - first - step) % size, axis)


def _turned(x: jax.Array, by: jax.Array, axis: int) -> jax.Array:
    """Return an array whose entry 0 along `axis` is entry `by` of the given one, and so on around."""
    return lax.dynamic_slice_in_dim(jnp.concatenate([x, x], axis), by, x.shape[axis], axis)


def written(
    rings: tuple[jax.Array, jax.Array], key: jax.Array, value: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return a layer's rings with each row's newest token; key, value: [slots, 1, kv_heads, head_dim]."""
    axes = places_axes()
    at = step % rings[0].shape[axes[0]]
    keys, values = (
        lax.dynamic_update_slice_in_dim(ring, jnp.moveaxis(new, 1, axis).astype(ring.dtype), at, axis)
        for ring, new, axis in zip(rings, (key, value), axes, strict=True)
    )
    return keys, values


def cached_attention(
    query: jax.Array,
    rings: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    step: jax.Array,
    cfg: Model,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend from each row's newest token to a ring buffer, which has that token.

    query: [slots, 1, heads, head_dim], scaled; positions: int32 [slots], of the newest tokens; sinks: see
    `attention_weights`. Returns [slots, 1, heads, head_dim].
    """
    slots, _, heads, head_dim = query.shape
    axes = places_axes()
    keys, values = rings
    size, kv_heads = keys.shape[axes[0]], keys.shape[1]
    age = (step - jnp.arange(size)) % size  # age of each place's token, if the row is that old
    seen = age <= positions[:, None]
    grouped = query.reshape(slots, kv_heads, heads // kv_heads, head_dim)
    product = "bkgh,bksh->bkgs" if axes[0] == 2 else "bkgh,bkhs->bkgs"
    logits = jnp.einsum(product, grouped, keys, preferred_element_type=jnp.float32)
    logits = jnp.where(seen[:, None, None], soft_cap(logits, cfg.attn_logit_softcap), jnp.finfo(jnp.float32).min)
    weights = attention_weights(logits, sinks).astype(values.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights, values).reshape(query.shape)

"""A decoder in the style of Gemma 2 (https://arxiv.org/abs/2408.00118): one weight table, then plain functions.

The table says all there is to know about a weight; initial values, abstract shapes and shardings derive from it.
Weights of all layers are stacked on a leading axis: a checkpoint is the same whether layers are scanned or unrolled.
Left out: dropout, untied output embeddings, attention kernels (`attention.attend` is a plain einsum).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn.initializers import Initializer, normal, zeros
from jax.sharding import Mesh

from conf.runfile import RunFileError
from conf.training import Model
from trainer import mesh as meshes
from trainer.attention import attend, rotate, soft_cap

Params = dict[str, Any]
"""The weights: arrays in the tree of `weight_table`."""


@dataclass(frozen=True)
class Weight:
    """One weight: its shape, the logical name of each axis (`mesh.RULES` maps them), its first values."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initializer
    dtype: str = "float32"


class Cache(NamedTuple):
    """Keys and values of the tokens seen so far, one array [B, length, kv_heads, head_dim] per layer.

    A token at position p lives in slot p. A query at position p sees slots 0 to p and no others: the caller feeds
    positions 0, 1, 2, ... of each row in order, and what padding to the right of a prompt has left in later slots is
    overwritten before anyone may look. Positions outside the cache are not stored.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def weight_table(cfg: Model) -> Params:
    """The tree of every `Weight` of the model."""
    layers, dim, heads, kv_heads, width, hidden = (
        cfg.layers, cfg.dim, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.hidden,
    )  # fmt: skip
    norm = Weight((layers, dim), ("layers", "embed"), zeros)
    by_dim = normal(dim**-0.5)
    return {
        "embedding": Weight((cfg.vocab, dim), ("vocab", "embed"), by_dim),
        "layers": {
            "attention_norm": norm,
            "query": Weight((layers, dim, heads, width), ("layers", "embed", "heads", "head_dim"), by_dim),
            "key": Weight((layers, dim, kv_heads, width), ("layers", "embed", "kv_heads", "head_dim"), by_dim),
            "value": Weight((layers, dim, kv_heads, width), ("layers", "embed", "kv_heads", "head_dim"), by_dim),
            "output": Weight(
                (layers, heads, width, dim), ("layers", "heads", "head_dim", "embed"), normal((heads * width) ** -0.5)
            ),
            "post_attention_norm": norm,
            "mlp_norm": norm,
            "gate": Weight((layers, dim, hidden), ("layers", "embed", "hidden"), by_dim),
            "up": Weight((layers, dim, hidden), ("layers", "embed", "hidden"), by_dim),
            "down": Weight((layers, hidden, dim), ("layers", "hidden", "embed"), normal(hidden**-0.5)),
            "post_mlp_norm": norm,
        },
        "final_norm": Weight((dim,), ("embed",), zeros),
    }


def init(cfg: Model, key: jax.Array) -> Params:
    """First values of all weights; the same for a key on any number of devices. Call it under jit to shard them."""
    weights, tree = jax.tree.flatten(weight_table(cfg))
    keys = jax.random.split(key, len(weights))
    return tree.unflatten([w.init(k, w.shape, jnp.dtype(w.dtype)) for w, k in zip(weights, keys, strict=True)])


def abstract(cfg: Model) -> Params:
    """Shape and type of every weight, without any array."""
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), weight_table(cfg))


def shardings(cfg: Model, mesh: Mesh) -> Params:
    """How the mesh splits every weight.

    Raises RunFileError where an axis cannot be split evenly.
    """
    table = weight_table(cfg)
    for path, weight in jax.tree.leaves_with_path(table):
        for size, axis in zip(weight.shape, weight.axes, strict=True):
            parts = 1 if axis is None else meshes.shards(mesh, axis)
            if axis is not None and size % parts:
                raise RunFileError(
                    f"mesh.{meshes.RULES[axis]}: {parts} devices cannot split the {size} {axis} of "
                    f"{jax.tree_util.keystr(path, simple=True, separator='.')} evenly"
                )
    return jax.tree.map(lambda w: meshes.named(mesh, *w.axes), table)


def init_cache(cfg: Model, batch: int, length: int) -> Cache:
    """An empty cache for `batch` sequences of up to `length` tokens, in the type of the activations."""
    shape = (batch, length, cfg.kv_heads, cfg.head_dim)
    empty = tuple(jnp.zeros(shape, cfg.activation_dtype) for _ in range(cfg.layers))
    return Cache(keys=empty, values=empty)


def forward(
    params: Params,
    cfg: Model,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None = None,
    cache: Cache | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Hidden states after the last norm: [B, T, D], in the type of the activations.

    tokens, positions: [B, T] integers; positions count from 0 in each document.
    Without a cache (training), a token sees the earlier ones of its row that have the same number in `segments` [B, T];
    None: the whole row is one document. Give padding a number of its own, or put it to the right and ignore its output.
    With a cache (prefill of many tokens, decoding of one), a token sees the slots up to its own position, as `Cache`
    tells; `segments` must be None. Returns the cache with the new tokens in it.
    """
    with jax.named_scope("embed"):
        x = params["embedding"].astype(cfg.activation_dtype)[tokens] * jnp.asarray(cfg.dim**0.5, cfg.activation_dtype)
        x = meshes.constrain(x, "batch", None, None)
    if cache is None:
        x = _train_layers(params["layers"], cfg, x, positions, _causal(tokens, segments))
    elif segments is not None:
        raise ValueError("segments and a cache exclude each other: a cached row is one document")
    else:
        x, cache = _cached_layers(params["layers"], cfg, x, positions, cache)
    return _norm(x, params["final_norm"], cfg), cache


def unembed(params: Params, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Logits in float32, [..., vocab], of hidden states [..., D]: for few positions; whole sequences: `chunked`."""
    with jax.named_scope("unembed"):
        table = params["embedding"].astype(hidden.dtype)
        logits = jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
        return soft_cap(logits, cfg.final_softcap)


def windows(cfg: Model) -> list[int]:
    """Tokens that each layer sees; more than any sequence has for global layers."""
    everything = jnp.iinfo(jnp.int32).max
    return [cfg.window if cfg.pattern[i % len(cfg.pattern)] == "L" else everything for i in range(cfg.layers)]


def _causal(tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Distance [B or 1, T, T] from a token to each it may see, negative where it may not."""
    index = jnp.arange(tokens.shape[1])
    distance = (index[:, None] - index[None, :])[None]
    if segments is None:
        return distance
    return jnp.where(segments[:, :, None] == segments[:, None, :], distance, -1)


def _within(distance: jax.Array, window: int | jax.Array) -> jax.Array:
    return (distance >= 0) & (distance < window)


def _train_layers(layers: Params, cfg: Model, x: jax.Array, positions: jax.Array, distance: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: Params, window: int | jax.Array) -> jax.Array:
        query, key, value = _project(x, weights, cfg, positions)
        mixed = attend(query, key, value, _within(distance, window), cfg.attention_softcap)
        return meshes.constrain(_finish(x, mixed, weights, cfg), "batch", None, None)

    if cfg.remat == "full":
        layer = jax.checkpoint(layer)  # in a scan and out of it, only the layer's input is kept
    if cfg.scan_layers:
        each = (layers, jnp.array(windows(cfg)))
        return lax.scan(lambda x, this: (layer(x, *this), None), x, each)[0]
    for weights, window in zip(_unstack(layers, cfg.layers), windows(cfg), strict=True):
        x = layer(x, weights, jnp.int32(window))
    return x


def _cached_layers(
    layers: Params, cfg: Model, x: jax.Array, positions: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Always unrolled: a scan would copy every layer's cache at each token."""
    distance = positions[:, :, None] - jnp.arange(cache.keys[0].shape[1])
    store = jax.vmap(lambda slots, at, new: slots.at[at].set(new, mode="drop"))
    keys, values = [], []
    for i, (weights, window) in enumerate(zip(_unstack(layers, cfg.layers), windows(cfg), strict=True)):
        query, key, value = _project(x, weights, cfg, positions)
        keys.append(store(cache.keys[i], positions, key))
        values.append(store(cache.values[i], positions, value))
        mixed = attend(query, keys[i], values[i], _within(distance, window), cfg.attention_softcap)
        x = _finish(x, mixed, weights, cfg)
    return x, Cache(tuple(keys), tuple(values))


def _unstack(layers: Params, count: int) -> list[Params]:
    """One tree per layer. Split, not indexed: the gradient is then one concatenation instead of a padded sum."""
    parts = jax.tree.map(lambda w: [p.squeeze(0) for p in lax.split(w, (1,) * count)], layers)
    return [{name: pieces[i] for name, pieces in parts.items()} for i in range(count)]


def _project(x: jax.Array, weights: Params, cfg: Model, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query (scaled), key and value [B, T, heads, head_dim] of a layer; query and key turned to their positions."""
    with jax.named_scope("project"):
        x = _norm(x, weights["attention_norm"], cfg)
        query, key, value = (
            jnp.einsum("btd,dnh->btnh", x, weights[name].astype(x.dtype)) for name in ("query", "key", "value")
        )
        query = rotate(query, positions, cfg.rope_base) * jnp.asarray(cfg.query_scalar**-0.5, x.dtype)
        return query, rotate(key, positions, cfg.rope_base), value


def _finish(x: jax.Array, mixed: jax.Array, weights: Params, cfg: Model) -> jax.Array:
    """The residual stream [B, T, D] after attention's output and the feed-forward block, each normed on both sides."""
    with jax.named_scope("attention_output"):
        mixed = jnp.einsum("btnh,nhd->btd", mixed, weights["output"].astype(x.dtype))
        x = x + _norm(mixed, weights["post_attention_norm"], cfg)
    with jax.named_scope("mlp"):
        y = _norm(x, weights["mlp_norm"], cfg)
        gate = jax.nn.gelu(y @ weights["gate"].astype(x.dtype), approximate=True)
        y = (gate * (y @ weights["up"].astype(x.dtype))) @ weights["down"].astype(x.dtype)
        return x + _norm(y, weights["post_mlp_norm"], cfg)


def _norm(x: jax.Array, scale: jax.Array, cfg: Model) -> jax.Array:
    """RMSNorm in float32 with a gain of 1 + scale (https://arxiv.org/abs/1910.07467)."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + cfg.norm_epsilon)
    return (wide * (1 + scale)).astype(x.dtype)

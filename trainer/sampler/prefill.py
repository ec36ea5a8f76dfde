"""Prefill: run each prompt through the model once for all of its samples."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from conf.schema.training.model import Model
from trainer.models import attention, decoder
from trainer.models.weights import Params
from trainer.sampler.cache import KVCache, places_axes


class PrefillResult(NamedTuple):
    """Prompts that wait for slots: arrays, or their partitions."""

    hidden: Any  # [P, D], of each prompt's last token
    cache: KVCache  # of the prompts, by position instead of place


def prefill(cfg: Model, copy: Params, tokens: jax.Array, lengths: jax.Array) -> PrefillResult:
    """Compute prompts. tokens: int32 [P, bucket], padded on the right with any token; lengths: int32 [P]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    keys: list[jax.Array] = []
    values: list[jax.Array] = []
    axes = places_axes()

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, window: int | None) -> jax.Array:
        keys.append(jnp.moveaxis(key, 1, axes[0]))
        values.append(jnp.moveaxis(value, 1, axes[1]))
        return attention.self_attention(query, key, value, None, window, cfg)

    first = x = decoder.embed(copy, cfg, tokens, positions)
    for i, weights in enumerate(copy["layers"]):
        x = decoder.decoder_layer(x, first, weights, cfg, positions, decoder.is_local_layer(cfg, i), attend)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return PrefillResult(decoder.final_hidden(last[:, 0], copy, cfg), KVCache(tuple(keys), tuple(values)))

"""Compute prompts, insert rows into slots, and decode a chunk of tokens for each."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.layer_kinds import layer_kind, source_layer
from conf.schema.training.model import Model
from trainer.models import attention, decoder, delta_net, per_layer, routes
from trainer.models.weights import Params
from trainer.sampler import cache as caches
from trainer.sampler.cache import KVCache, places_axes
from trainer.sampler.settings import PLAIN, Distribution, SamplerSettings

MASKED_LOGIT = -1e30
"""Logit of an excluded token: its probability is exactly 0."""


def sample_token(
    logits: jax.Array,
    keys: jax.Array,
    at: jax.Array,
    temperature: jax.Array,
    drawn_from: Distribution = PLAIN,
    said: "Said | None" = None,
) -> tuple[jax.Array, jax.Array]:
    """Sample a token per row of logits [B, V]: int32 [B], and its log-probability in that distribution, float32 [B].

    keys: [B], one per row; at: int32 [B], the token's index within its row, which varies the randomness; said: what
    penalties need. Temperature 0 takes the likeliest token, with its log-probability at temperature 1. Sampling uses
    the Gumbel-max trick. A row with a logit that is NaN or infinity has the log-probability NaN.
    """
    changed = change_logits(logits, drawn_from, said)
    scaled = truncate_logits(changed / jnp.where(temperature > 0, temperature, 1.0), drawn_from)

    def noise() -> jax.Array:
        return jax.vmap(lambda key, i: jax.random.gumbel(jax.random.fold_in(key, i), logits.shape[1:]))(keys, at)

    drawn = scaled + lax.cond(temperature > 0, noise, lambda: jnp.zeros_like(scaled))
    token = jnp.argmax(drawn, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    return token, chosen - jax.nn.logsumexp(scaled, axis=-1)


class Said(NamedTuple):
    """The tokens that each row has: arrays, or their partitions. Only penalties need them."""

    prompt: Any  # bool [rows, V]: whether the prompt has the token
    response: Any  # int32 [rows, V]: how often the response has it


def change_logits(logits: jax.Array, drawn_from: Distribution, said: Said | None) -> jax.Array:
    """Return the logits [B, V] with biases and penalties."""
    if drawn_from.logit_bias:
        ids, biases = zip(*drawn_from.logit_bias, strict=True)
        logits = logits.at[:, jnp.array(ids)].add(jnp.array(biases, logits.dtype))
    if said is not None:
        in_response, penalty = said.response > 0, drawn_from.repetition_penalty
        repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(said.prompt | in_response, repeated, logits)
        logits -= drawn_from.presence_penalty * in_response + drawn_from.frequency_penalty * said.response
    return logits


def truncate_logits(logits: jax.Array, drawn_from: Distribution) -> jax.Array:
    """Set the logits [B, V] of excluded tokens to MASKED_LOGIT; ties are kept or excluded together.

    First min_p (https://arxiv.org/abs/2407.01082), then top_k, then top_p (https://arxiv.org/abs/1904.09751): the
    smallest set of likeliest tokens, among those left, whose probability reaches it. NaN is neither less than nor equal
    to anything, so it stays and shows.
    """
    top_k, top_p = drawn_from.top_k, drawn_from.top_p
    if drawn_from.min_p is not None:
        least = logits.max(axis=-1, keepdims=True) + math.log(drawn_from.min_p)
        logits = jnp.where(logits < least, MASKED_LOGIT, logits)
    if top_k is not None and top_k < logits.shape[-1]:
        least = lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, MASKED_LOGIT, logits)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < top_p  # the likelier ones fall short of top_p
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, MASKED_LOGIT, logits)
    return logits


class PrefillResult(NamedTuple):
    """Prompts that wait for slots: arrays, or their partitions."""

    hidden: Any  # [P, D], of each prompt's last token
    cache: KVCache  # of the prompts, by position instead of place
    said: Any  # bool [P, V], see Said; None without penalties
    routes: Any = None  # [P, bucket, layers * per_token], see `models.routes`; None if nobody wants them


def prefill(
    cfg: Model, settings: SamplerSettings, copy: Params, tokens: jax.Array, lengths: jax.Array
) -> PrefillResult:
    """Compute prompts. tokens: int32 [P, bucket], padded on the right with any token; lengths: int32 [P]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    used: dict[int, decoder.KeysAndValues] = {}
    keys: list[jax.Array] = []
    values: list[jax.Array] = []
    memories: list[delta_net.Memory] = []
    chosen: list[jax.Array] = []
    axes = places_axes()

    def remember(inputs: delta_net.Inputs, kernels: tuple[jax.Array, ...]) -> jax.Array:
        out, memory = delta_net.run(inputs, kernels, counted=positions < lengths[:, None])
        memories.append(memory)
        return out

    first = x = decoder.embed(copy, cfg, tokens, positions)
    own_input = per_layer.layer_input(copy, cfg, tokens)
    for i, weights in enumerate(copy["layers"]):
        kind = layer_kind(cfg, i)

        def attend(
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            window: int | None,
            sinks: jax.Array | None,
            i: int = i,
            own: bool = not kind.shares,
        ) -> jax.Array:
            if own:
                used[i] = key, value
                keys.append(jnp.moveaxis(key, 1, axes[0]))
                values.append(jnp.moveaxis(value, 1, axes[1]))
            return attention.self_attention(query, key, value, None, window, cfg, sinks)

        shared = used[source_layer(cfg, i)] if kind.shares else None
        x = decoder.decoder_layer(
            x, first, weights, cfg, positions, kind, attend, recurrence=remember, shared=shared, own_input=own_input,
            choose=routes.recorder(chosen),
        )  # fmt: skip
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    said = None
    if settings.drawn_from.has_penalties:
        none = jnp.zeros((len(tokens), cfg.vocab_size), bool)
        said = none.at[jnp.arange(len(tokens))[:, None], tokens].max(positions < lengths[:, None])
    cache = KVCache(tuple(keys), tuple(values), tuple(memories))
    taken = routes.joined(chosen, cfg, *tokens.shape) if settings.returns_routes else None
    return PrefillResult(decoder.final_hidden(last[:, 0], copy, cfg), cache, said, taken)


NO_TOKEN = -1
"""Stands for a token after the end of a row."""


class Slots(NamedTuple):
    """Rows in flight: arrays, or their partitions."""

    hidden: Any  # [slots, D] of the newest token
    position: Any  # int32 [slots], of the next token
    num_generated: Any  # int32 [slots]: tokens of the response so far
    row: Any  # int32 [slots]: the row's number, which seeds its randomness
    active: Any  # bool [slots]
    step: Any  # int32: decoding steps since the beginning, shared by all rows
    cache: KVCache
    said: Said | None  # None without penalties


def init_slots(cfg: Model, drawn_from: Distribution, slots: int, length: int) -> Slots:
    """Return empty slots. length: tokens of the longest row, prompt and response."""
    none = jnp.zeros(slots, jnp.int32)
    hidden = jnp.zeros((slots, cfg.dim), cfg.activation_dtype)
    said = None
    if drawn_from.has_penalties:
        words = jnp.zeros((slots, cfg.vocab_size), jnp.int32)
        said = Said(words > 0, words)
    return Slots(hidden, none, none, none, none > 0, jnp.int32(0), caches.init_cache(cfg, slots, length), said)


def insert_prompts(
    slots: Slots, prompts: PrefillResult, source: jax.Array, lengths: jax.Array, rows: jax.Array
) -> Slots:
    """Insert new rows into some of the slots.

    source: int32 [slots], the prompt of each slot's new row, negative if none; lengths, rows: int32 [slots], of the new
    rows.
    """
    new, said = source >= 0, slots.said
    if said is not None:
        in_prompt = prompts.said[jnp.maximum(source, 0)]
        said = Said(jnp.where(new[:, None], in_prompt, said.prompt), jnp.where(new[:, None], 0, said.response))
    return Slots(
        jnp.where(new[:, None], prompts.hidden[jnp.maximum(source, 0)], slots.hidden),
        jnp.where(new, lengths, slots.position),
        jnp.where(new, 0, slots.num_generated),
        jnp.where(new, rows, slots.row),
        new | slots.active,
        slots.step,
        caches.insert_prompts(slots.cache, prompts.cache, source, lengths, slots.step),
        said,
    )


def resize_cache(slots: Slots, cfg: Model, length: int) -> Slots:
    """Return the slots with a cache for rows of at most `length` tokens; no row in flight may be longer."""
    return slots._replace(cache=caches.resize(slots.cache, cfg, length, slots.step))


class _DecodeState(NamedTuple):
    t: jax.Array
    slots: Slots
    tokens: jax.Array  # int32 [slots, chunk]
    logprobs: jax.Array  # float32 [slots, chunk]
    routes: Any  # [slots, chunk, layers * per_token]; None if nobody wants them


def decode(
    copy: Params,
    cfg: Model,
    settings: SamplerSettings,
    ends: tuple[int, ...],
    slots: Slots,
    wanted: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
) -> tuple[Slots, jax.Array, jax.Array | None]:
    """Decode up to `settings.chunk` tokens for each row; fewer once all have ended.

    ends: tokens that end a row; wanted: bool [slots], False if the host found the row's end. Returns the slots and
    int32 [2, slots, chunk]: the tokens, NO_TOKEN after the end, and the bits of their float32 log-probabilities in the
    distribution they were drawn from; and the tokens' routes [slots, chunk, layers * per_token], or None.
    """
    count, chunk = slots.row.shape[0], settings.chunk
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(slots.row)

    def not_ended(loop: _DecodeState) -> jax.Array:
        return (loop.t < chunk) & jnp.any(loop.slots.active)

    def next_token(loop: _DecodeState) -> _DecodeState:
        now = loop.slots
        logits = decoder.unembed(copy, cfg, now.hidden)
        token, logprob = sample_token(logits, keys, now.num_generated, temperature, settings.drawn_from, now.said)
        told = jnp.where(now.active, token, NO_TOKEN)
        logprob = jnp.where(now.active, logprob, 0.0)
        lasts = now.num_generated + 1 >= settings.max_new_tokens
        lasts |= jnp.isin(token, jnp.array(ends, jnp.int32))
        hidden, cache, chosen = _decode_step(copy, cfg, token, now)
        moved = now.active.astype(jnp.int32)
        said = now.said
        if said is not None:
            said = said._replace(response=said.response.at[jnp.arange(count), token].add(moved))
        later = now._replace(
            hidden=hidden,
            position=now.position + moved,
            num_generated=now.num_generated + moved,
            active=now.active & ~lasts,
            step=now.step + 1,
            cache=cache,
            said=said,
        )
        write = lambda into, new: lax.dynamic_update_slice_in_dim(into, new[:, None], loop.t, axis=1)  # noqa: E731
        taken = None if loop.routes is None else write(loop.routes, routes.joined(chosen, cfg, count))
        return _DecodeState(loop.t + 1, later, write(loop.tokens, told), write(loop.logprobs, logprob), taken)

    tokens = jnp.full((count, chunk), NO_TOKEN, jnp.int32)
    taken = jnp.zeros((count, chunk, routes.per_row(cfg)), routes.dtype(cfg)) if settings.returns_routes else None
    begun = slots._replace(active=slots.active & wanted)
    start = _DecodeState(jnp.int32(0), begun, tokens, jnp.zeros((count, chunk)), taken)
    ended = lax.while_loop(not_ended, next_token, start)
    bits = lax.bitcast_convert_type(ended.logprobs, jnp.int32)
    # rows that begin next count from here on every device, however early this device's rows all ended
    return ended.slots._replace(step=slots.step + chunk), jnp.stack([ended.tokens, bits]), ended.routes


def _decode_step(
    copy: Params, cfg: Model, token: jax.Array, slots: Slots
) -> tuple[jax.Array, KVCache, list[jax.Array]]:
    """Return the hidden states [slots, D] of one more token per slot, the updated cache, and each layer's routes."""
    chosen: list[jax.Array] = []
    rings = dict(zip(caches.layers_with_rings(cfg), zip(*slots.cache[:2], strict=True), strict=True))
    memories = dict(zip(caches.recurrent_layers(cfg), slots.cache.memories, strict=True))
    tokens, positions = token[:, None], slots.position[:, None]
    first = x = decoder.embed(copy, cfg, tokens, positions)
    own_input = per_layer.layer_input(copy, cfg, tokens)
    for i, weights in enumerate(copy["layers"]):
        kind, source = layer_kind(cfg, i), source_layer(cfg, i)

        def attend(
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            window: int | None,
            sinks: jax.Array | None,
            i: int = i,
            source: int = source,
        ) -> jax.Array:
            if source == i:
                rings[i] = caches.written(rings[i], key, value, slots.step)
            return caches.cached_attention(query, rings[source], slots.position, slots.step, cfg, sinks)

        def recall(inputs: delta_net.Inputs, kernels: tuple[jax.Array, ...], i: int = i) -> jax.Array:
            out, memories[i] = delta_net.run(inputs, kernels, memories[i])
            return out

        shared = rings[source] if kind.shares else None
        x = decoder.decoder_layer(
            x, first, weights, cfg, positions, kind, attend, recurrence=recall, shared=shared, own_input=own_input,
            choose=routes.recorder(chosen),
        )  # fmt: skip
    keys, values = (tuple(ring[part] for ring in rings.values()) for part in (0, 1))
    return decoder.final_hidden(x[:, 0], copy, cfg), KVCache(keys, values, tuple(memories.values())), chosen

"""Draw responses from the policy: one prefill, then a token at a time until every row has ended.

A row's tokens depend on the weights, its prompt, and its own key alone: not on the rows beside it, nor on the number
of devices or processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from conf.decoder import Model
from trainer import mesh as meshes
from trainer.model import Cache, forward, init_cache, unembed
from trainer.tokenizer import EOS, PAD
from trainer.weights import Params


class Prompts(NamedTuple):
    """What to continue: arrays of JAX, or of NumPy on the way there."""

    tokens: Any  # int32 [B, P], padded to the right
    lengths: Any  # int32 [B]
    ids: Any  # int32 [B]: the number of the sample within its step; gives the row its randomness


class Responses(NamedTuple):
    """What was drawn."""

    tokens: jax.Array  # int32 [B, R]: up to and with the end, then PAD
    lengths: jax.Array  # int32 [B]: tokens, the end included
    logprobs: jax.Array  # float32 [B, R]: of each token in the distribution it was drawn from; 0 after the end


class _Loop(NamedTuple):
    """What changes from token to token."""

    t: jax.Array
    hidden: jax.Array  # [B, D] of the newest token
    done: jax.Array  # bool [B]
    cache: Cache
    drawn: Responses


Sampler = Callable[[Params, Prompts, jax.Array, jax.Array], Responses]


def build(cfg: Model, response_length: int, mesh: Mesh, eos: int = EOS) -> Sampler:
    """The jitted sampler: (params, prompts, key, temperature) to responses of at most `response_length` tokens.

    A row ends with `eos`; one below 0 is no token, and never ends it. Temperature 0 takes the likeliest token. Where
    every device holds all weights, each one draws its own rows and stops when they have ended; no device waits for
    another.
    """

    def sample(params: Params, prompts: Prompts, key: jax.Array, temperature: jax.Array) -> Responses:
        return draw(params, cfg, prompts, key, temperature, response_length, eos)

    if meshes.is_data_parallel(mesh):
        rows, whole = meshes.spec("batch"), PartitionSpec()
        sample = jax.shard_map(sample, mesh=mesh, in_specs=(whole, rows, whole, whole), out_specs=rows, check_vma=False)
    return jax.jit(sample, out_shardings=meshes.named(mesh, "batch"))


def draw(
    params: Params,
    cfg: Model,
    prompts: Prompts,
    key: jax.Array,
    temperature: jax.Array,
    response_length: int,
    eos: int = EOS,
) -> Responses:
    """`build`'s function on the rows of one device."""
    batch, longest = prompts.tokens.shape
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(prompts.ids)

    def not_ended(loop: _Loop) -> jax.Array:
        return (loop.t < response_length) & ~jnp.all(loop.done)

    def next_token(loop: _Loop) -> _Loop:
        logits = unembed(params, cfg, loop.hidden)
        token, logprob = _choose(logits, keys, loop.t, temperature)
        token = jnp.where(loop.done, PAD, token)
        drawn = Responses(
            loop.drawn.tokens.at[:, loop.t].set(token),
            loop.drawn.lengths + ~loop.done,
            loop.drawn.logprobs.at[:, loop.t].set(jnp.where(loop.done, 0.0, logprob)),
        )
        positions = (prompts.lengths + loop.t)[:, None]
        hidden, cache = forward(params, cfg, token[:, None], positions, cache=loop.cache)
        assert cache is not None
        return _Loop(loop.t + 1, hidden[:, 0], loop.done | (token == eos), cache, drawn)

    with jax.named_scope("prefill"):
        positions = jnp.broadcast_to(jnp.arange(longest), (batch, longest))
        cache = init_cache(cfg, batch, longest + response_length)
        hidden, cache = forward(params, cfg, prompts.tokens, positions, cache=cache)
        assert cache is not None
        last = jnp.take_along_axis(hidden, (prompts.lengths - 1)[:, None, None], axis=1)[:, 0]
    empty = Responses(
        jnp.full((batch, response_length), PAD, jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros((batch, response_length), jnp.float32),
    )
    with jax.named_scope("decode"):
        start = _Loop(jnp.int32(0), last, jnp.zeros(batch, bool), cache, empty)
        return lax.while_loop(not_ended, next_token, start).drawn


def _choose(logits: jax.Array, keys: jax.Array, t: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A token [B] for each row of logits [B, V], by the row's own key, and its log-probability."""
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    noise = jax.vmap(lambda k: jax.random.gumbel(jax.random.fold_in(k, t), logits.shape[1:]))(keys)
    token = jnp.argmax(jnp.where(temperature > 0, scaled + noise, scaled), axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    return token, chosen - jax.nn.logsumexp(scaled, axis=-1)

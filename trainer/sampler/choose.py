"""Sample tokens from logits by temperature, top-k and top-p, with their log-probabilities."""

import jax
import jax.numpy as jnp
from jax import lax

MASKED_LOGIT = -1e30
"""Logit of an excluded token: its probability is exactly 0."""


def sample_token(
    logits: jax.Array,
    keys: jax.Array,
    at: jax.Array,
    temperature: jax.Array,
    top_k: int | None = None,
    top_p: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sample a token per row of logits [B, V]: int32 [B], and its log-probability in that distribution, float32 [B].

    keys: [B], one per row; at: int32 [B], the token's index within its row, which varies the randomness. Temperature 0
    takes the likeliest token, with its log-probability at temperature 1. Sampling uses the Gumbel-max trick.
    """
    scaled = truncate_logits(logits / jnp.where(temperature > 0, temperature, 1.0), top_k, top_p)

    def noise() -> jax.Array:
        return jax.vmap(lambda key, i: jax.random.gumbel(jax.random.fold_in(key, i), logits.shape[1:]))(keys, at)

    drawn = scaled + lax.cond(temperature > 0, noise, lambda: jnp.zeros_like(scaled))
    token = jnp.argmax(drawn, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    return token, chosen - jax.nn.logsumexp(scaled, axis=-1)


def truncate_logits(logits: jax.Array, top_k: int | None, top_p: float | None) -> jax.Array:
    """Set the logits [B, V] of excluded tokens to MASKED_LOGIT; ties are kept or excluded together.

    top_p (https://arxiv.org/abs/1904.09751): keep the smallest set of likeliest tokens, among those left by top_k,
    whose probability reaches it.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        least = lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, MASKED_LOGIT)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < top_p  # the likelier ones fall short of top_p
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, MASKED_LOGIT)
    return logits

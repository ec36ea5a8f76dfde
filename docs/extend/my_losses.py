"""Losses of each token: one for GRPO, one for language models. Shapes are [B, T]."""

import jax
import jax.numpy as jnp


def cispo(logprobs, old_logprobs, advantages, mask, *, cap: float = 2.0):
    """Weigh each token by its clipped ratio, which gets no gradient (https://arxiv.org/abs/2506.13585, eq. 4)."""
    ratio = jnp.exp((logprobs - old_logprobs) * mask)
    return -jax.lax.stop_gradient(jnp.minimum(ratio, cap)) * advantages * logprobs


def focal(logprobs, entropy, *, gamma: float = 2.0):
    """Weigh tokens that are already likely less (https://arxiv.org/abs/1708.02002, eq. 4)."""
    return -((1 - jnp.exp(logprobs)) ** gamma) * logprobs

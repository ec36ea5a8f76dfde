"""Which tokens are drawn, how often, and what their log-probabilities are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.sampler.choose import sample_token, truncate_logits

LOGITS = jnp.array([0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5, -2.0])
BOUND = 24.3
"""The 99.9th percentile of chi-square with 7 degrees of freedom."""


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (None, None, range(8)),
        (8, 1.0, range(8)),
        (None, 0.6, [3, 6]),
        (4, 0.9, [3, 6, 1]),  # of the four that top_k leaves, these have 0.91
        (1, None, [3]),
    ],
)
def test_frequencies_follow_the_softmax_of_what_is_left(top_k, top_p, kept):
    """20,000 draws, each with the key of a row of its own."""
    count, temperature = 20_000, 0.8
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(count))
    drawn = jax.jit(sample_token, static_argnums=(4, 5))
    at, rows = jnp.full(count, 3), jnp.broadcast_to(LOGITS, (count, 8))
    token, logprob = drawn(rows, keys, at, jnp.float32(temperature), top_k, top_p)
    weights = np.zeros(8)
    weights[list(kept)] = np.exp(np.asarray(LOGITS)[list(kept)] / temperature)
    expected = weights / weights.sum()
    observed = np.bincount(np.asarray(token), minlength=8)
    possible = expected > 0
    assert not observed[~possible].any()
    wanted = expected[possible] * count
    assert ((observed[possible] - wanted) ** 2 / wanted).sum() < BOUND
    np.testing.assert_allclose(np.exp(logprob), expected[token], rtol=1e-5)


def test_each_token_of_a_row_has_randomness_of_its_own():
    keys = jnp.broadcast_to(jax.random.key(0), (64,))
    token, _ = jax.jit(sample_token)(jnp.broadcast_to(LOGITS, (64, 8)), keys, jnp.arange(64), jnp.float32(1))
    assert len(np.unique(token)) > 4


def test_at_temperature_0_the_likeliest_token_is_taken():
    keys = jax.random.split(jax.random.key(0), 1)
    token, logprob = jax.jit(sample_token)(LOGITS[None], keys, jnp.zeros(1, int), jnp.float32(0))
    assert token.tolist() == [3]
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(LOGITS)[3:4], rtol=1e-6)


def test_equal_logits_go_together():
    left = truncate_logits(jnp.array([[1.0, 2.0, 1.0, 0.0]]), 2, None)
    assert (left > -1e29).tolist() == [[True, True, True, False]]

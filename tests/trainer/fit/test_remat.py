"""What is computed again for the backward pass changes memory and time, and no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.conftest import make_mesh
from trainer.fit.remat import REMAT_POLICIES
from trainer.losses import token_logprobs
from trainer.models import decoder, layers, weights
from trainer.step.program import Program

BATCH, LENGTH = 4, 22
POLICIES = (*REMAT_POLICIES["decoder"][1:], "offload")


def gradient_of(cfg):
    def loss(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        hidden = decoder.forward(params, cfg, tokens, positions)
        return token_logprobs.cross_entropy(hidden, params, tokens, jnp.ones(tokens.shape), cfg)

    return jax.jit(jax.value_and_grad(loss))


@pytest.fixture
def tokens():
    return jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, 512)


@pytest.mark.parametrize(
    ("policies", "post_norms", "scan", "pattern"),
    [
        (("chunks", "outputs"), True, True, "L"),
        *(pytest.param(POLICIES, *case, marks=pytest.mark.deep) for case in ((True, True, "LG"), (False, False, "LG"))),
    ],
)
def test_loss_and_gradients_are_those_of_no_policy(tiny, tokens, policies, post_norms, scan, pattern, monkeypatch):
    """`chunks` has chunks of 8 of 22 positions; the last one is padded."""
    monkeypatch.setattr(decoder, "FFN_CHUNK_TOKENS", 10 * BATCH)
    tiny = tiny.model_copy(update={"post_norms": post_norms, "logit_chunk": 8, "attention_pattern": pattern})
    tiny = tiny.model_copy(update={"num_layers": len(pattern)})
    params = jax.jit(weights.init_params, static_argnums=0)(tiny, jax.random.key(0))
    loss, gradients = gradient_of(tiny.model_copy(update={"remat": "none"}))(params, tokens)
    for policy in policies:
        cfg = tiny.model_copy(update={"remat": policy, "scan_layers": scan})
        found, others = gradient_of(cfg)(params, tokens)
        np.testing.assert_allclose(found, loss, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=policy)


def test_chunks_count_the_tokens_of_a_device(tiny, tokens, monkeypatch):
    """Four rows on two devices: 12 tokens are 6 positions of each row."""
    monkeypatch.setattr(decoder, "FFN_CHUNK_TOKENS", 12)
    seen = []
    monkeypatch.setattr(decoder, "map_chunks", lambda function, size, x: (seen.append(size), function(x))[1])
    for policy, size in (("chunks", 6), ("full", LENGTH)):
        cfg = tiny.model_copy(update={"remat": policy, "num_layers": 1})
        with jax.set_mesh(make_mesh(1, 2, 4)):
            gradient_of(cfg).lower(weights.abstract_params(cfg), tokens)
        assert set(seen) == {size}
        seen.clear()


@pytest.mark.parametrize(("length", "most", "size"), [(8192, 1365, 1024), (22, 10, 8), (100, 100, 100), (1, 4, 1)])
def test_chunks_have_no_padding_where_a_few_more_avoid_it(length, most, size):
    """A limit of 4,096 tokens, on a device with 3 rows of 8,192, is no divisor of them."""
    seen = []
    x = jnp.arange(length, dtype=jnp.float32).reshape(1, length, 1)
    found = layers.map_chunks(lambda part: (seen.append(part.shape[1]), 2 * part)[1], most, x)
    np.testing.assert_array_equal(found, 2 * x)
    assert set(seen) == {size}


def test_chunks_cost_no_operations(tiny, tokens, monkeypatch):
    cfg = tiny.model_copy(update={"remat": "chunks", "num_layers": 1})
    counts = []
    for size in (LENGTH * BATCH, LENGTH * BATCH // 2):
        monkeypatch.setattr(decoder, "FFN_CHUNK_TOKENS", size)
        counts.append(Program("gradient", gradient_of(cfg), (weights.abstract_params(cfg), tokens)).flops())
    assert counts[0] == counts[1]

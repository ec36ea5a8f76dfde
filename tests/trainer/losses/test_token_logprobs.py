"""Log-probabilities and entropy in chunks: the numbers of a plain computation, without its large array."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from conf.schema.training.model import Model
from tests.trainer.conftest import make_mesh
from trainer.distributed import mesh
from trainer.losses import token_logprobs
from trainer.models import decoder


@pytest.fixture(params=[5, 100])
def case(tiny: Model, request: pytest.FixtureRequest):
    """Config, hidden states [3, 24, D], weights and targets; the length is no multiple of all chunks."""
    cfg = tiny.model_copy(update={"logit_chunk": request.param, "final_logit_softcap": 2.0})
    params = {"embedding": jax.random.normal(jax.random.key(0), (cfg.vocab_size, cfg.dim))}
    hidden = jax.random.normal(jax.random.key(1), (3, 24, cfg.dim))
    return cfg, hidden, params, jax.random.randint(jax.random.key(2), (3, 24), 0, cfg.vocab_size)


def test_equal_optax_and_the_definition_of_entropy(case):
    """With a temperature: test_grpo.py. That no large array is compiled: tests/trainer/step/test_program.py."""
    cfg, hidden, params, targets = case
    logprobs, entropy = jax.jit(lambda h: token_logprobs.token_logprobs(h, params, targets, cfg))(hidden)
    logits = decoder.unembed(params, cfg, hidden)
    expected = -optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(entropy, optax.safe_softmax_cross_entropy(logits, jax.nn.softmax(logits)), atol=1e-5)


def test_target_scores_say_which_targets_are_the_likeliest(case):
    """The soft cap flattens the best of these logits to less than the error of a tanh, and still the best one wins."""
    cfg, hidden, params, targets = case
    likeliest = (np.asarray(hidden, float) @ np.asarray(params["embedding"], float).T).argmax(-1)
    targets = jnp.where(targets % 2, targets, likeliest)
    logits = decoder.unembed(params, cfg, hidden)
    assert ((logits > logits.max(-1, keepdims=True) - 1e-6).sum(-1) > 1).any()
    logprobs, greedy = jax.jit(lambda h: token_logprobs.target_scores(h, params, targets, cfg))(hidden)
    expected = -optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(greedy, targets == likeliest)
    assert 0 < greedy.mean() < 1


def test_gradients_equal_those_of_the_whole_array(case):
    cfg, hidden, params, targets = case
    weights = (targets % 3).astype(jnp.float32)

    def whole(params, hidden):
        logits = decoder.unembed(params, cfg, hidden)
        entropy = optax.safe_softmax_cross_entropy(logits, jax.nn.softmax(logits))
        crossed = (optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights).sum()
        return crossed + 0.1 * entropy.sum()

    def ours(params, hidden):
        crossed = token_logprobs.cross_entropy(hidden, params, targets, weights, cfg)
        return crossed + 0.1 * token_logprobs.token_logprobs(hidden, params, targets, cfg)[1].sum()

    found, wanted = (jax.jit(jax.grad(f, (0, 1)))(params, hidden) for f in (ours, whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), found, wanted)


def test_a_vocabulary_that_the_devices_do_not_divide(tiny):
    """Values and gradients are those of one device, and no device holds the whole output layer or its gradient."""
    cfg = tiny.model_copy(update={"vocab_size": 1021, "logit_chunk": 8})
    devices, length = make_mesh(1, 8, 1), 16
    hidden = jax.random.normal(jax.random.key(1), (8, length, cfg.dim))
    targets = jax.random.randint(jax.random.key(2), (8, length), 0, 1021).at[:, 0].set(1020)
    params = {"embedding": jax.random.normal(jax.random.key(0), (1021, cfg.dim))}

    def loss(params, hidden):
        logprobs, entropy = token_logprobs.token_logprobs(hidden, params, targets, cfg)
        return (logprobs + 0.5 * entropy).sum()

    wanted = jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(params, hidden))
    kept = mesh.named_sharding(devices, "vocab", "embed")
    placed = {"embedding": jax.device_put(params["embedding"], kept)}

    def gradient(params, hidden):
        total, (of_params, of_hidden) = jax.value_and_grad(loss, (0, 1))(params, hidden)
        return total, (jax.lax.with_sharding_constraint(of_params, {"embedding": kept}), of_hidden)

    with jax.set_mesh(devices):
        compiled = jax.jit(gradient).lower(placed, hidden).compile()
        found = jax.tree.leaves(compiled(placed, hidden))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    shapes = set(re.findall(r"f32\[([\d,]+)\]", compiled.as_text()))
    assert f"128,{cfg.dim}" in shapes  # one device's part of 1,024 rows
    assert not {f"{n},{cfg.dim}" for n in (1021, 1024)} & shapes

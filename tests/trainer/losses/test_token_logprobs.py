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
    cfg, hidden, params, targets = case
    logprobs, entropy = jax.jit(lambda h: token_logprobs.token_logprobs(h, params, targets, cfg))(hidden)
    logits = decoder.unembed(params, cfg, hidden)
    expected = -optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(entropy, optax.safe_softmax_cross_entropy(logits, jax.nn.softmax(logits)), atol=1e-5)


def test_target_scores_say_which_targets_are_the_likeliest(case):
    cfg, hidden, params, targets = case
    logits = decoder.unembed(params, cfg, hidden)
    targets = jnp.where(targets % 2, targets, logits.argmax(-1))
    logprobs, greedy = jax.jit(lambda h: token_logprobs.target_scores(h, params, targets, cfg))(hidden)
    np.testing.assert_allclose(
        logprobs, -optax.softmax_cross_entropy_with_integer_labels(logits, targets), atol=1e-5, rtol=0
    )
    np.testing.assert_array_equal(greedy, targets == logits.argmax(-1))
    assert 0 < greedy.mean() < 1


def test_gradients_equal_those_of_the_whole_array(case):
    cfg, hidden, params, targets = case
    weights = (targets % 3).astype(jnp.float32)

    def whole(params, hidden):
        logits = decoder.unembed(params, cfg, hidden)
        return (optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights).sum()

    def ours(params, hidden):
        return token_logprobs.cross_entropy(hidden, params, targets, weights, cfg)

    for a, b in zip(
        *(jax.tree.leaves(jax.jit(jax.grad(f, (0, 1)))(params, hidden)) for f in (ours, whole)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_temperature_gives_the_sampled_distribution(case):
    cfg, hidden, params, targets = case
    logprobs, entropy = token_logprobs.token_logprobs(hidden, params, targets, cfg, temperature=0.5)
    exact = jax.nn.log_softmax(decoder.unembed(params, cfg, hidden) / 0.5)
    np.testing.assert_allclose(logprobs, jnp.take_along_axis(exact, targets[..., None], 2)[..., 0], atol=1e-5)
    np.testing.assert_allclose(entropy, -(jnp.exp(exact) * exact).sum(-1), atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 1, 1), (2, 2, 2)])
def test_no_array_of_batch_sequence_vocab_is_compiled(tiny, sizes):
    """No array of the optimized program, gradients included, is as large as all logits of one device's rows."""
    batch, length = 8, 128
    cfg = tiny.model_copy(update={"vocab_size": 2048, "logit_chunk": 16})
    devices = make_mesh(*sizes)
    rows = mesh.named_sharding(devices, "batch")
    params = {
        "embedding": jax.ShapeDtypeStruct(
            (2048, cfg.dim), "float32", sharding=mesh.named_sharding(devices, "vocab", "embed")
        )
    }
    hidden = jax.ShapeDtypeStruct((batch, length, cfg.dim), "float32", sharding=rows)
    targets = jax.ShapeDtypeStruct((batch, length), "int32", sharding=rows)

    def loss(params, hidden, targets):
        logprobs, entropy = token_logprobs.token_logprobs(hidden, params, targets, cfg)
        return logprobs.sum() + entropy.sum()

    with jax.set_mesh(devices):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(params, hidden, targets).compile().as_text()
    sizes_found = {int(np.prod([int(n) for n in shape.split(",")])) for shape in re.findall(r"\w\d+\[([\d,]+)\]", text)}
    per_device = batch * length * 2048 // int(np.prod(sizes))
    assert per_device // 8 in sizes_found  # a chunk of logits: the search sees what it should
    assert max(sizes_found) < per_device


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

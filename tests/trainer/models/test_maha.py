"""Attention at several scales against a reference in NumPy; nothing sees the future, in any form; gradients; meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from conf.schema.training.run_yaml import RunFileError
from tests.trainer.conftest import make_mesh
from tests.trainer.finite_differences import check_gradient
from tests.trainer.models import nash_reference
from tests.trainer.models.test_residual import (
    forward,
    model_of,
    perturbed,
    tokens_and_positions,
)
from trainer.models import decoder, weights
from trainer.sampler import Sampler, SamplerSettings, StopCriteria
from trainer.telemetry import throughput

SMALL = {"num_layers": 1, "dim": 8, "num_heads": 2, "num_kv_heads": 2, "mlp_dim": 8}
NASH, CONVEX = {"scales": 3, "nash_iterations": 3}, {"scales": 3, "aggregation": "convex"}


@pytest.mark.parametrize(("settings", "residual", "length"), [(NASH, "mhc", 13), (CONVEX, "plain", 16)])
def test_hidden_states_equal_the_reference(settings, residual, length):
    cfg = model_of(attention_form="maha", maha=settings, residual=residual)
    (tokens, positions), params = tokens_and_positions(length), perturbed(cfg)
    found = forward(params, cfg, tokens, positions)
    for row, ids in zip(found, tokens, strict=True):
        expected = nash_reference.hidden_states(jax.tree.map(np.asarray, params), cfg, np.asarray(ids))
        np.testing.assert_allclose(row, expected, rtol=0, atol=3e-5)


ATTENTIONS = {
    "causal": {},
    "nash": {"attention_form": "maha", "maha": NASH},
    "convex": {"attention_form": "maha", "maha": CONVEX},
}


@pytest.mark.parametrize(
    ("residual", "form"),
    [
        ("plain", "nash"),
        ("mhc_lite", "convex"),
        ("nash_hc", "causal"),
        pytest.param("mhc", "causal", marks=pytest.mark.deep),
    ],
)
def test_nothing_depends_on_the_future(residual, form):
    """The Jacobian of each position's output by each later position's embedding is exactly 0."""
    cfg, length = model_of(residual=residual, scan_layers=True, hyper={"streams": 2}, **ATTENTIONS[form]), 11
    params, (_, positions) = perturbed(cfg), tokens_and_positions(length, 1)
    aim = jax.random.normal(jax.random.key(5), (cfg.dim,))

    def out(embedding: jax.Array) -> jax.Array:
        return (decoder.forward(params | {"embedding": embedding}, cfg, jnp.arange(length)[None], positions) @ aim)[0]

    found = np.abs(jax.jit(jax.jacrev(out))(params["embedding"])).max(axis=-1)[:, :length]
    assert (np.triu(found, 1) == 0).all()
    assert (found[-1] > 0).all()
    assert (np.diag(found) > 0).all()


@pytest.mark.parametrize("settings", [{"scales": 2, "nash_iterations": 0}, {"scales": 2, "aggregation": "convex"}])
def test_gradients_equal_finite_differences(settings):
    """Best responses have no gradient, on purpose."""
    cfg = model_of(attention_form="maha", maha=settings, scan_layers=True, remat="attention", **SMALL)
    (tokens, positions), params = tokens_and_positions(6, 1), perturbed(cfg)
    aim = jax.random.normal(jax.random.key(3), (1, 6, 8))

    def loss(params: weights.Params) -> jax.Array:
        return (decoder.forward(params, cfg, tokens, positions) * aim).mean()

    check_gradient(jax.jit(jax.value_and_grad(loss)), params)


def test_gradients_are_finite_where_all_tokens_are_equal():
    cfg, (tokens, positions) = model_of(attention_form="maha", maha=NASH, **SMALL), tokens_and_positions()
    params = perturbed(cfg)
    params["layers"] |= {"output": 0 * params["layers"]["output"]}  # every scale finds the same

    def loss(params: weights.Params) -> jax.Array:
        return (decoder.forward(params, cfg, 0 * tokens, positions) ** 2).sum()

    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_the_work_is_that_of_the_matrices_by_hand():
    cfg = model_of(attention_form="maha", maha=NASH)
    d, length = cfg.dim, 64
    queries_and_keys, kernels = 2 * d * d * (1 + 1 / 2 + 1 / 4), 2 * 3 * d * d * (1 / 2 + 1 / 4)
    value, output, feed_forward = d * d, d * d * (1 + 1 / 2 + 1 / 4), 3 * d * cfg.mlp_dim
    pairs = 12 * d * length * (1 + 1 / 4 + 1 / 16)
    layer = 6 * (queries_and_keys + kernels + value + output + feed_forward) + pairs
    expected = 128 * (cfg.num_layers * layer + 6 * d * cfg.vocab_size)
    assert throughput.model_flops(cfg, 128, length) == pytest.approx(expected)


@pytest.mark.parametrize(
    "changes",
    [{"biases": "qkv"}, {"attention_pattern": "LG"}, {"num_kv_heads": 2}, {"num_heads": 8, "num_kv_heads": 8}],
)
def test_models_that_it_does_not_suit_are_errors(changes):
    with pytest.raises(ValidationError, match="attention_form maha needs"):
        model_of(attention_form="maha", **changes)


def test_there_is_no_sampler_and_no_packing():
    cfg = model_of(attention_form="maha")
    with pytest.raises(RunFileError, match="maha has no cache"):
        Sampler(cfg, SamplerSettings(4, 4, slots=1, chunk=2), make_mesh(1, 1, 1), StopCriteria(()))
    tokens, positions = tokens_and_positions()
    with pytest.raises(RunFileError, match="one document per row"):
        decoder.forward(perturbed(cfg), cfg, tokens, positions, segments=0 * tokens)

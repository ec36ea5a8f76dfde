"""Attention at several scales: nothing sees the future, in any form; gradients; test_residual.py has the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from conf.schema.training.run_yaml import RunFileError
from tests.trainer.conftest import make_mesh
from tests.trainer.models.test_residual import CONVEX, NASH, model_of, perturbed, tokens_and_positions
from trainer.models import decoder, weights
from trainer.sampler import Sampler, SamplerSettings, StopCriteria
from trainer.telemetry import throughput


@pytest.mark.parametrize(
    ("residual", "form"),
    [("plain", NASH), ("mhc_lite", CONVEX), ("nash_hc", {}), pytest.param("mhc", {}, marks=pytest.mark.deep)],
    ids=["plain-nash", "mhc_lite-convex", "nash_hc", "mhc"],
)
def test_nothing_depends_on_the_future(residual, form):
    """The Jacobian of each position's output by each later position's embedding is exactly 0."""
    cfg, length = model_of(residual=residual, scan_layers=True, hyper={"streams": 2}, **form), 11
    params, (_, positions) = perturbed(cfg), tokens_and_positions(length, 1)
    aim = jax.random.normal(jax.random.key(5), (cfg.dim,))

    def out(embedding: jax.Array, of: jax.Array) -> jax.Array:
        rows = decoder.forward(params | {"embedding": embedding}, cfg, jnp.arange(length)[None], positions)
        return (rows @ aim)[0] @ of

    slope = jax.jit(jax.grad(out))
    found = np.stack([np.abs(slope(params["embedding"], of)).max(-1)[:length] for of in np.eye(length, dtype="f")])
    assert (np.triu(found, 1) == 0).all()
    assert (found[-1] > 0).all()
    assert (np.diag(found) > 0).all()


def test_gradients_are_finite_where_all_tokens_are_equal():
    cfg = model_of(num_layers=1, dim=8, num_heads=2, num_kv_heads=2, mlp_dim=8, **NASH)
    (tokens, positions), params = tokens_and_positions(), perturbed(cfg)
    params["layers"] |= {"output": 0 * params["layers"]["output"]}  # every scale finds the same

    def loss(params: weights.Params) -> jax.Array:
        return (decoder.forward(params, cfg, 0 * tokens, positions) ** 2).sum()

    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_the_work_is_that_of_the_matrices_by_hand():
    cfg = model_of(**NASH)
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

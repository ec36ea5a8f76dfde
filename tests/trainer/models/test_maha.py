"""Attention at several scales against a reference in NumPy; nothing sees the future, in any form; gradients; meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from conf.schema.training.run_yaml import RunFileError
from tests.conftest import deep
from tests.trainer.conftest import make_mesh
from tests.trainer.distributed import mesh_agreement
from tests.trainer.finite_differences import check_gradient
from tests.trainer.models import nash_reference
from tests.trainer.models.test_residual import (
    FORMS,
    forward,
    model_of,
    perturbed,
    small_on_meshes,
    tokens_and_positions,
)
from trainer.distributed.runtime import shard_batch
from trainer.models import decoder, weights
from trainer.sampler import Sampler, SamplerSettings, StopCriteria
from trainer.telemetry import throughput

SMALL = {"num_layers": 1, "dim": 8, "num_heads": 2, "num_kv_heads": 2, "mlp_dim": 8}
NASH, CONVEX = {"scales": 3, "nash_iterations": 3}, {"scales": 3, "aggregation": "convex"}


@pytest.mark.parametrize(
    ("settings", "residual", "length"),
    [(NASH, "plain", 13), (CONVEX, "plain", 16), pytest.param(NASH, "mhc", 16, marks=pytest.mark.deep)],
)
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
FAST = {("plain", "nash"), ("mhc_lite", "convex"), ("nash_hc", "causal")}
EVERY = [
    pytest.param(residual, form, marks=() if (residual, form) in FAST else pytest.mark.deep)
    for residual in ("plain", *FORMS)
    for form in ATTENTIONS
]


@pytest.mark.parametrize(("residual", "form"), EVERY)
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
    cfg = model_of(attention_form="maha", maha=settings, **SMALL)
    (tokens, positions), params = tokens_and_positions(6, 1), perturbed(cfg)
    aim = jax.random.normal(jax.random.key(3), (1, 6, 8))

    def loss(params: weights.Params) -> jax.Array:
        return (decoder.forward(params, cfg, tokens, positions) * aim).mean()

    check_gradient(jax.jit(jax.value_and_grad(loss)), params)


@pytest.mark.parametrize("settings", [NASH, *deep(CONVEX)])
def test_gradients_are_finite_where_all_tokens_are_equal(settings):
    cfg, (tokens, positions) = model_of(attention_form="maha", maha=settings, **SMALL), tokens_and_positions()
    params = perturbed(cfg)
    params["layers"] |= {"output": 0 * params["layers"]["output"]}  # every scale finds the same

    def loss(params: weights.Params) -> jax.Array:
        return (decoder.forward(params, cfg, 0 * tokens, positions) ** 2).sum()

    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


@pytest.mark.deep  # tests/trainer/fit/test_remat.py has every policy
@pytest.mark.parametrize("residual", ["plain", "mhc"])
def test_recomputing_changes_nothing(residual):
    cfg, (tokens, positions) = model_of(attention_form="maha", maha=NASH, residual=residual), tokens_and_positions(12)
    params = perturbed(cfg)

    def gradient(**changes: object) -> weights.Params:
        saving = cfg.model_copy(update=changes)
        return jax.jit(jax.grad(lambda p: (decoder.forward(p, saving, tokens, positions)[..., 0]).sum()))(params)

    found, wanted = gradient(remat="attention", scan_layers=True), gradient()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-4)


def test_hidden_states_on_a_mesh_are_those_of_one_device():
    cfg = small_on_meshes(residual="mhc", attention_form="maha", maha=NASH, remat="none")
    params, found = perturbed(cfg), []
    tokens = mesh_agreement.make_rows()["tokens"]
    for sizes in ((1, 1, 1), (2, 2, 2)):
        devices = make_mesh(*sizes)
        with jax.set_mesh(devices):
            placed = jax.device_put(params, weights.param_shardings(cfg, devices))
            rows = shard_batch({"tokens": tokens, "at": np.broadcast_to(np.arange(12), tokens.shape)}, devices)
            found.append(np.asarray(forward(placed, cfg, rows["tokens"], rows["at"])))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-4 * np.abs(found[0]).max())


@pytest.mark.deep
@pytest.mark.parametrize("sizes", mesh_agreement.MESHES[1:])
def test_updates_on_any_mesh(sizes):
    cfg = small_on_meshes(residual="mhc", attention_form="maha", maha=NASH)
    found, alone = (mesh_agreement.train_on_mesh(cfg, make_mesh(*shape)) for shape in (sizes, (1, 1, 1)))
    np.testing.assert_allclose(found["curve"][:, 0], alone["curve"][:, 0], rtol=1e-4)
    np.testing.assert_allclose(found["curve"][:, 1], alone["curve"][:, 1], rtol=1e-3)  # the gradient's norm
    assert set(found["held"]) == {int(found["table"])}


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

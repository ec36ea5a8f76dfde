"""Residual forms against a reference in NumPy; what holds at the start; Sinkhorn; gradients; decoding; meshes."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from conf.formats import RunFileError
from conf.schema.training.model import Model
from tests.conftest import wide
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from tests.trainer.models import nash_reference
from tests.trainer.step import test_train_step
from trainer.models import decoder, residual, weights
from trainer.sampler import Sampler, SamplerSettings, StopCriteria
from trainer.telemetry import throughput

NASH = {"attention_form": "maha", "maha": {"scales": 3, "nash_iterations": 3}}
CONVEX = {"attention_form": "maha", "maha": {"scales": 3, "aggregation": "convex"}}
SIZES = {
    **{"num_layers": 2, "dim": 16, "num_heads": 4, "num_kv_heads": 4, "head_dim": 4, "mlp_dim": 24, "vocab_size": 31},
    **{"activation_dtype": "float32", "scan_layers": False, "remat": "none", "max_seq_len": 64, "logit_chunk": 8},
}
forward = jax.jit(decoder.forward, static_argnums=1)


def check_gradient(graded: Callable[[Any], tuple[Any, Any]], params: Any) -> None:
    """Compare the slope of a loss along a random direction. graded: params to the loss and its gradient, jitted."""
    random, step = np.random.default_rng(0), 1e-2
    direction = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), params)
    _, gradient = graded(params)
    ahead, behind = (
        graded(jax.tree.map(lambda x, d, s=sign: np.asarray(x) + s * step / 2 * d, params, direction))[0]
        for sign in (1, -1)
    )
    found = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose(found, (ahead - behind) / step, rtol=2e-2)


def model_of(**changes: object) -> Model:
    return Model(**load_group("model/family/llama3") | SIZES | changes)


@cache
def _initial(cfg: Model) -> weights.Params:
    # not jitted: models of equal shapes share what is compiled
    return jax.tree.map(np.asarray, weights.init_params(cfg, jax.random.key(0)))


def initial(cfg: Model) -> weights.Params:
    """Its first weights, which do not depend on how it is computed."""
    alike = _initial(cfg.model_copy(update={"scan_layers": False, "remat": "none", "attention": "auto"}))
    return jax.tree.map(jnp.asarray, alike)


def perturbed(cfg: Model, size: float = 0.5) -> weights.Params:
    """Weights far from their special initial values."""
    random = np.random.default_rng(1)
    return jax.tree.map(lambda w: w + np.float32(size / 4) * random.normal(size=w.shape).astype("f"), initial(cfg))


def tokens_and_positions(length: int = 13, rows: int = 2) -> tuple[jax.Array, jax.Array]:
    tokens = jax.random.randint(jax.random.key(2), (rows, length), 0, SIZES["vocab_size"])
    return tokens, jnp.broadcast_to(jnp.arange(length), (rows, length))


@pytest.mark.parametrize(
    ("form", "attention", "length"),
    [("plain", CONVEX, 16), ("mhc", NASH, 13), ("mhc_lite", {}, 13), ("nash_hc", {}, 13)],
    ids=["plain-convex", "mhc-nash", "mhc_lite", "nash_hc"],
)
def test_hidden_states_equal_the_reference(form, attention, length):
    cfg, (tokens, positions) = model_of(residual=form, hyper={"streams": 3}, **attention), tokens_and_positions(length)
    params = perturbed(cfg)
    found = forward(params, cfg, tokens, positions)
    for row, ids in zip(found, tokens, strict=True):
        expected = nash_reference.hidden_states(jax.tree.map(np.asarray, params), cfg, np.asarray(ids))
        np.testing.assert_allclose(row, expected, rtol=0, atol=3e-5 if attention else 2e-5)


def test_at_the_start_the_streams_compute_what_one_does():
    """With their scales at 0 exactly, as far as columns add up to 1; at 0.01 within 1 %, after 24 layers."""
    (tokens, positions), plain = tokens_and_positions(), model_of(num_layers=24, scan_layers=True)
    cfg = model_of(num_layers=24, scan_layers=True, residual="mhc")
    params = initial(cfg)
    layers = {name: w for name, w in params["layers"].items() if "_streams" not in name}
    expected = forward(params | {"layers": layers}, plain, tokens, positions)
    still = {name: 0 * w if name.endswith("_streams_scale") else w for name, w in params["layers"].items()}
    np.testing.assert_allclose(forward(params | {"layers": still}, cfg, tokens, positions), expected, atol=5e-5)
    found = forward(params, cfg, tokens, positions)
    assert 0 < np.sqrt(((found - expected) ** 2).mean()) < 0.01 * np.sqrt((expected**2).mean())


def test_the_mixing_of_channels_begins_with_most_of_the_skip_or_as_published_without_it():
    kept = {}
    for init_diag in (True, False):
        cfg = model_of(residual="nash_hc", hyper={"init_diag": init_diag}, dim=64, head_dim=16)
        layer = jax.tree.map(lambda w: w[0], initial(cfg)["layers"])
        x = jax.random.normal(jax.random.key(1), (1, 5, cfg.dim))
        out = residual.connect(jnp.zeros_like, x, layer, "mlp", cfg)
        kept[init_diag] = jnp.linalg.norm(out) / jnp.linalg.norm(x)
    assert kept[True] == pytest.approx(1 - 1 / (2 * SIZES["num_layers"]), abs=0.02)
    assert kept[False] < 0.2


@pytest.mark.parametrize(
    ("form", "attention"),
    [
        ("mhc", {"attention_form": "maha", "maha": {"scales": 2, "nash_iterations": 0}}),  # of replies there is none
        pytest.param(
            "mhc_lite",
            {"attention_form": "maha", "maha": {"scales": 2, "aggregation": "convex"}},
            marks=pytest.mark.deep,
        ),
        pytest.param("nash_hc", {}, marks=pytest.mark.deep),
    ],
    ids=["mhc-nash", "mhc_lite-convex", "nash_hc"],
)
def test_gradients_equal_finite_differences_and_are_finite_where_all_tokens_are_equal(form, attention):
    """Best responses have no gradient, on purpose."""
    small = {"num_layers": 1, "dim": 8, "num_heads": 2, "num_kv_heads": 2, "mlp_dim": 8, "hyper": {"streams": 2}}
    small |= attention
    cfg = model_of(residual=form, scan_layers=True, remat="full", **small)  # gradients are recomputed, as in training
    (tokens, positions), params = tokens_and_positions(5, 1), perturbed(cfg)
    aim = jax.random.normal(jax.random.key(3), (1, 5, 8))

    @jax.jit
    @jax.value_and_grad
    def graded(params: weights.Params, tokens: jax.Array) -> jax.Array:
        return (decoder.forward(params, cfg, tokens, positions) * aim).mean()

    check_gradient(lambda params: graded(params, tokens), params)
    for start in (initial(cfg), jax.tree.map(np.zeros_like, params)):
        _, gradient = graded(start, 0 * tokens)
        assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.deep
@pytest.mark.parametrize("form", ["mhc", *wide("mhc_lite", "nash_hc")])
def test_greedy_replies_with_a_cache_are_those_of_whole_rows(form):
    cfg = model_of(residual=form)
    params, prompts = perturbed(cfg), [[3, 1, 4, 1], [5, 9, 2]]
    sampler = Sampler(cfg, SamplerSettings(4, 6, slots=2, chunk=3), make_mesh(1, 1, 1), StopCriteria(()))
    copy = sampler.load_params(params)
    drawn = sampler.generate(copy, prompts, 1, jax.random.key(0), 0.0)
    for prompt, found in zip(prompts, sorted(drawn, key=lambda completion: completion.row), strict=True):
        row = np.zeros((1, 10), np.int32)  # padded behind the shorter one, which sees nothing of it
        row[0, : len(prompt) + 6] = [*prompt, *found.tokens.tolist()]
        hidden = forward(params, cfg, row, np.arange(10)[None])
        chosen = decoder.unembed(params, cfg, hidden).argmax(axis=-1)[0, len(prompt) - 1 :][:6]
        np.testing.assert_array_equal(found.tokens, chosen)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("form", "sizes", "attention"),
    [("mhc", (2, 2, 2), NASH), ("mhc_lite", (1, 4, 2), {}), ("nash_hc", (4, 1, 2), {})],
    ids=["mhc-maha", "mhc_lite", "nash_hc"],
)
def test_updates_on_any_mesh(tiny, adamw, form, sizes, attention):
    changes = {"num_kv_heads": 4, "attention_pattern": "G", "scan_layers": True, "residual": form, "remat": "products"}
    cfg = Model.model_validate(tiny.model_dump() | changes | attention)
    test_train_step.assert_equal_one(cfg, adamw, sizes, 20, 1e-4, 1e-3)


def test_too_many_permutations_are_an_error():
    with pytest.raises(ValidationError, match="streams! permutations"):
        model_of(residual="mhc_lite", hyper={"streams": 6})


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

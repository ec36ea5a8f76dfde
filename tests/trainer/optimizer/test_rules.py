"""Which weights get what: groups by path, Muon's matrices, rates by shape."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import TypeAdapter, ValidationError

from conf.formats import RunFileError
from conf.schema.training.model import Model
from conf.schema.training.optimizer import Optimizer, Schedule
from tests.groups import load_group
from trainer.models import weights
from trainer.optimizer.chain import build_optimizer, learning_rate_schedule
from trainer.optimizer.rules import schedule_factor, update_rules

SMALL = {"num_layers": 2, "dim": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "mlp_dim": 18, "vocab_size": 10}


def model(family: str) -> Model:
    return Model(**load_group(f"model/{family}") | SMALL)


def read(name: str, **changes) -> Optimizer:
    return TypeAdapter(Optimizer).validate_python(load_group(f"optimizer/{name}") | changes)


@pytest.mark.parametrize("family", ["gpt2", "gemma2_2b", "qwen2_5_0_5b", "nanochat_d16"])
def test_muon_takes_the_products_of_the_layers(family):
    """Not biases of heads, though these have two axes."""
    names = {path for path, rule in update_rules(read("muon"), model(family)).items() if rule.direction == "muon"}
    products = {"query", "key", "value", "output", "up", "down"} | ({"gate"} if family[:2] in ("ge", "qw") else set())
    assert names == {f"layers.{name}" for name in products}


@pytest.mark.parametrize(
    ("scale", "factors"),
    [
        ("none", {"query": 1, "key": 1, "output": 1, "up": 1, "down": 1}),
        ("aspect", {"query": 1.5**0.5, "key": 1, "output": 1, "up": 2.25**0.5, "down": 1}),
        ("match_adamw", {"query": 0.2 * 12**0.5, "key": 0.2 * 8**0.5, "output": 0.2 * 12**0.5, "up": 0.2 * 18**0.5}),
    ],
)
@pytest.mark.parametrize("scaled_decay", [False, True])
def test_rates_follow_the_shape_of_the_matrix(scale, factors, scaled_decay):
    """Heads are merged: query is 8 x 12 here, key 8 x 6, output 12 x 8, up 8 x 18."""
    opt = read("muon", lr=0.5, weight_decay=0.1, shape_scale=scale, scaled_decay=scaled_decay)
    found = update_rules(opt, model("nanochat_d16"))
    for name, factor in factors.items():
        rule = found[f"layers.{name}"]
        assert rule.lr == pytest.approx(0.5 * factor)
        assert rule.lr * rule.weight_decay == pytest.approx(0.05 * (factor if scaled_decay else 1))


@pytest.mark.parametrize(("weight_decay", "factor"), [(0.0, 1.0), (0.1, 1 - 0.5 * 0.1)])
def test_without_a_gradient_only_weight_decay_changes_weights(weight_decay, factor):
    """As torch's AdamW: the decay is no part of the loss."""
    constant = {"kind": "constant", "warmup_steps": 0}
    cfg, opt = model("gpt2"), read("adamw", lr=0.5, weight_decay=weight_decay, schedule=constant)
    params = jax.tree.map(lambda x: np.full(x.shape, 0.25, np.float32), weights.abstract_params(cfg))
    chain = build_optimizer(opt, cfg)

    @jax.jit
    def update(params: weights.Params) -> weights.Params:
        changes, _ = chain.update(jax.tree.map(jnp.zeros_like, params), chain.init(params), params)
        return optax.apply_updates(params, changes)

    for found in jax.tree.leaves(update(params)):
        np.testing.assert_array_equal(found, np.float32(0.25 * factor))


def test_the_first_group_that_matches_counts():
    groups = [
        {"match": "layers.*_norm", "weight_decay": 0.0, "lr_scale": 0.5},
        {"match": "layers.*", "lr": 0.2, "reference_dim": 2},
        {"match": "embedding", "algorithm": "adamw", "b2": 0.999},
        {"match": "*.up", "lr": 1.0},
    ]
    opt = read("adamw", lr=0.1, weight_decay=0.3, param_groups=groups[:2])
    found = update_rules(opt, model("gemma2_2b"))
    assert (found["layers.mlp_norm"].lr, found["layers.mlp_norm"].weight_decay) == (0.05, 0.0)
    assert (found["layers.up"].lr, found["layers.up"].weight_decay) == (0.1, 0.3)  # 0.2 * (8 / 2) ** -0.5
    assert (found["embedding"].lr, found["embedding"].weight_decay) == (0.1, 0.3)
    groups.insert(1, {"match": "layers.key", "algorithm": "adamw"})
    muon = update_rules(read("muon", param_groups=groups[1:]), model("gemma2_2b"))
    assert (muon["layers.key"].direction, muon["layers.query"].direction) == ("adamw", "muon")
    assert muon["layers.up"].lr == pytest.approx(0.1 * 0.2 * 18**0.5)
    assert muon["embedding"].b2 == 0.999 != muon["final_norm"].b2
    assert muon["embedding"].direction != muon["final_norm"].direction == "adamw"


def test_a_pattern_without_a_weight_names_those_there_are():
    """Unless it is not required."""
    groups = [{"match": "layer.*", "required": False, "lr": 7.0}, {"match": "*", "lr": 0.5}]
    assert {rule.lr for rule in update_rules(read("adamw", param_groups=groups), model("gpt2")).values()} == {0.5}
    with pytest.raises(RunFileError, match=r"optimizer\.param_groups\.1\.match: 'layer\.\*' matches no .* embedding, "):
        build_optimizer(read("adamw", param_groups=[{"match": "*"}, {"match": "layer.*"}]), model("gpt2"))


def test_a_group_may_be_frozen():
    cfg = model("nanochat_d16")
    chain = build_optimizer(read("nanochat", param_groups=[{"match": "layers.*", "lr_scale": 0.0}]), cfg)
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), weights.abstract_params(cfg))
    changes, _ = jax.jit(lambda p: chain.update(p, chain.init(p), p))(params)
    assert optax.tree_utils.tree_norm(changes["layers"]) == 0 < optax.tree_utils.tree_norm(changes)


def test_a_constant_rate_keeps_the_ratios():
    """Of the warm start before GRPO."""
    found = update_rules(read("nanochat"), model("nanochat_d16"))
    assert (found["layers.residual_scale"].lr, found["layers.embedding_scale"].lr) == (0.005, 0.5)
    opt = read("nanochat").with_constant_lr(0.002)
    found = update_rules(opt, model("nanochat_d16"))
    assert found["layers.embedding_scale"].lr == pytest.approx(0.05)
    assert found["layers.down"].lr == 0.002
    assert learning_rate_schedule(opt)(10**6) == pytest.approx(0.002)


def first_step(gradients: dict[str, list[float]], **changes) -> dict[str, np.ndarray]:
    """AdamW's first step without moments, so that a step tells its gradient; by name of the layers' weights."""
    plain = {"b1": 0.0, "b2": 0.0, "eps": 0.5, "lr": 1.0, "max_grad_norm": None}
    opt = read("adamw", **plain | {"schedule": {"kind": "constant", "warmup_steps": 0}} | changes)
    cfg = model("nanochat_d16")
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), weights.abstract_params(cfg))
    given = jax.tree.map(np.copy, params)
    given["layers"] |= {name: np.array(values, np.float32) for name, values in gradients.items()}
    chain = build_optimizer(opt, cfg)
    return jax.jit(lambda g, p: chain.update(g, chain.init(p), p))(given, params)[0]["layers"]


@pytest.mark.parametrize(("norm", "clipped"), [(None, [3, 4]), (1.0, [0.6, 0.8])])
def test_the_gradient_is_clipped_by_its_global_norm(norm, clipped):
    found = first_step({"residual_scale": [3, 4]}, max_grad_norm=norm)["residual_scale"]
    np.testing.assert_allclose(found, -np.array(clipped) / (np.array(clipped) + 0.5), rtol=1e-5)


def test_a_step_is_clipped_by_its_root_mean_square_weight_by_weight():
    gradients = {"residual_scale": [3, 4], "embedding_scale": [0.1, -0.2]}
    found = first_step(gradients, update_clip=0.5)
    large, small = (-np.array(g) / (np.abs(g) + 0.5) for g in gradients.values())
    rms = np.sqrt(np.mean(large**2))
    assert np.sqrt(np.mean(small**2)) < 0.5 < rms
    np.testing.assert_allclose(found["residual_scale"], large * 0.5 / rms, rtol=1e-5)
    np.testing.assert_allclose(found["embedding_scale"], small, rtol=1e-5)


def read_schedule(**schedule):
    return TypeAdapter(Schedule).validate_python(schedule)


def stable(warmup: int, decay: int, horizon: int) -> dict:
    parts = {"warmup_steps": warmup, "decay_steps": decay, "horizon_steps": horizon}
    return parts | {"kind": "warmup_stable_decay", "final_fraction": 0.5}


LINEAR = {"kind": "linear", "warmup_steps": 0, "horizon_steps": 4}
COSINE = {"kind": "cosine", "warmup_steps": 0, "horizon_steps": 3}


@pytest.mark.parametrize(
    ("schedule", "shares", "zero_after"),
    [
        ({"kind": "constant", "warmup_steps": 0}, [1, 1, 1], None),
        ({"kind": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1], None),
        (LINEAR | {"final_fraction": 0.0}, [1, 0.75, 0.5, 0.25, 0, 0], 4),
        (LINEAR | {"warmup_steps": 2, "final_fraction": 0.5}, [0.5, 1, 1, 0.75, 0.5, 0.5], None),
        (COSINE | {"horizon_steps": 2, "final_fraction": 0.0}, [1, 0.5, 0, 0], 2),
        (COSINE | {"warmup_steps": 1, "final_fraction": 0.5}, [1, 1, 0.75, 0.5], None),
        (stable(0, 2, 4), [1, 1, 1, 0.75, 0.5, 0.5], None),
        (stable(0, 2, 4) | {"final_fraction": 0.0}, [1, 1, 1, 0.5, 0], 4),
        (stable(2, 2, 5), [0.5, 1, 1, 1, 0.75, 0.5], None),
        (stable(2, 2, 4), [0.5, 1, 1, 0.75, 0.5], None),
        ({"kind": "piecewise", "points": [[1, 0.5], [3, 1.0], [4, 0.0]]}, [0.5, 0.5, 0.75, 1, 0, 0], 4),
        (None, [1, 1], None),
    ],
)
def test_share_of_each_update(schedule, shares, zero_after):
    """And when nothing is left."""
    found = None if schedule is None else read_schedule(**schedule)
    assert found is None or found.zero_after == zero_after
    by_count = schedule_factor(found)
    np.testing.assert_allclose([by_count(count) for count in range(len(shares))], shares, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (stable(3, 2, 4), r"warmup_steps \(3\) and decay_steps \(2\) together exceed horizon_steps \(4\)"),
        ({"kind": "piecewise", "points": [[2, 1.0], [2, 0.0]]}, "numbers of updates must ascend, not 2, 2"),
    ],
)
def test_parts_that_do_not_fit_are_refused(schedule, words):
    with pytest.raises(ValidationError, match=words):
        read_schedule(**schedule)

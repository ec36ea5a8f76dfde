"""Deep supervision against the PyTorch code of the paper's authors (fixtures/make_trm.py), and the loss by itself."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.loop_parts import PuzzleLoop, Trm
from tests.conftest import wide
from tests.groups import load_group
from tests.paths import ROOT
from tests.trainer.models import trm_reference as reference
from trainer.distributed.checksums import leaf_path
from trainer.losses import puzzle
from trainer.models.weights import weight_table
from trainer.optimizer.rules import map_with_path

KNOWN = np.load(ROOT / "tests" / "trainer" / "fixtures" / "trm.npz")


def make_cfg(**changes: Any) -> Trm:
    usual = reference.SIZES | {"activation_dtype": "float32", "remat": "none"}
    return Trm.model_validate(load_group("model/trm") | usual | changes)


def make_loop(**changes: Any) -> PuzzleLoop:
    usual = {"supervision_steps": reference.SUPERVISION_STEPS, "batch_size": reference.BATCH}
    usual |= {"epochs": None, "steps": 3}
    return PuzzleLoop.model_validate(load_group("loop/puzzle") | usual | changes)


def reference_params(cfg: Trm) -> Any:
    table = weight_table(cfg)
    shapes = map_with_path(lambda path, w: (path, w.shape), table)
    made = reference.weights(dict(jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))))
    return map_with_path(lambda path, _: jnp.asarray(made[path]), table)


def incoming(step: int) -> dict[str, np.ndarray]:
    return reference.puzzles(step) | {"min_steps": np.zeros(reference.BATCH, np.int32)}


@pytest.mark.parametrize("case", ["mlp", *wide("learned", "attention_cycles", "mlp_cycles")])
def test_three_chained_updates_are_those_of_the_authors_code(case: str) -> None:
    """Same weights, same puzzles. A row that halts takes the next puzzle; halting decisions are equal."""
    states, gradients = {"attention_cycles": (1e-3, 5e-3), "mlp_cycles": (1e-2, 5e-3)}.get(case, (1e-4, 1e-4))
    cfg = make_cfg(**reference.CASES[case])
    params, carry = reference_params(cfg), puzzle.initial_carry(cfg, reference.BATCH)
    update = jax.jit(jax.grad(partial(_mean_loss, puzzle.loss(cfg, make_loop())), has_aux=True))
    answer = jax.jit(partial(puzzle.advance, cfg=cfg))
    for step in range(reference.STEPS):
        known = {n.removeprefix(f"{case}/{step}/"): KNOWN[n] for n in KNOWN if n.startswith(f"{case}/{step}/")}
        logits = answer(params, carry=carry, batch=incoming(step))[1]
        gradient, (sums, carry) = update(params, carry, incoming(step))
        np.testing.assert_array_equal(carry.steps, known["steps"])
        np.testing.assert_array_equal(carry.halted, known["halted"])
        for name, found in (("h", carry.latents.h), ("l", carry.latents.l), ("logits", logits.logits)):
            np.testing.assert_allclose(found, known[name], rtol=states, atol=states, err_msg=f"{step} {name}")
        for name in ("loss", "lm_loss", "q_loss"):
            assert float(sums[name].total / sums[name].weight) == pytest.approx(float(known[name]), abs=1e-3)
        names = {"cell_accuracy": "accuracy", "exact_accuracy": "exact_accuracy", "q_accuracy": "q_halt_accuracy"}
        for ours, theirs in names.items():
            assert float(sums[ours].total) == pytest.approx(float(known[f"count/{theirs}"]), abs=1e-5)
        for keys, x in jax.tree.leaves_with_path(gradient):
            path, whole = leaf_path(keys), np.asarray(x)
            if not path.startswith("initial"):
                *some, norm = known[f"gradient/{path}"]
                found = reference.thinned(whole)
                np.testing.assert_allclose(np.linalg.norm(whole), norm, rtol=gradients, atol=1e-7, err_msg=path)
                np.testing.assert_allclose(found, some, rtol=0, atol=gradients * max(norm, 1e-6), err_msg=path)
            else:
                assert not whole.any()


def _mean_loss(loss: Any, params: Any, carry: Any, batch: Any) -> Any:
    sums, new = loss(params, batch, carry)
    return sums["loss"].total / sums["loss"].weight, (sums, new)


def test_the_gradient_is_finite_where_the_literal_formula_is_not() -> None:
    """At a logit of 1 the literal form divides by 0 in the branch that it does not take."""

    def literal(x: jax.Array) -> jax.Array:
        s = jnp.where(x < 0, 1 / (1 - x + 1e-30), x + 1)
        return jnp.log(s / s.sum(-1, keepdims=True))

    x = jnp.float32([[1.0, -3.0, 0.0, 50.0, -1e4, 1e6]])
    np.testing.assert_allclose(puzzle.log_stablemax(x), literal(x), rtol=1e-5, atol=1e-5)
    for formula, is_finite in ((puzzle.log_stablemax, True), (literal, False)):
        assert np.isfinite(jax.grad(lambda x, f=formula: f(x)[0, 0])(x)).all() == is_finite


def test_exploration_delays_halting_and_evaluation_never_halts() -> None:
    cfg = make_cfg(h_cycles=1, l_cycles=1)
    params = reference_params(cfg)
    params["halt_bias"] = jnp.float32([9.0, 0.0])  # halt at once
    params["halt"] = jnp.zeros_like(params["halt"])
    step = jax.jit(puzzle.loss(cfg, make_loop(supervision_steps=4)))
    eager, carry = incoming(0), puzzle.initial_carry(cfg, reference.BATCH)
    batch = eager | {"min_steps": np.int32([0, 1, 2, 3])}
    halted = []
    for _ in range(3):
        _, carry = step(params, batch, carry)
        halted.append(np.asarray(carry.halted).tolist())
    assert halted == [[True, True, False, False], [True, True, True, False], [True, True, False, True]]
    solved = jax.jit(puzzle.build_eval(cfg, make_loop(supervision_steps=4), 2))(params, eager)
    assert solved["exact"].shape == solved["halt"].shape == (reference.BATCH, 4)
    assert solved["boards"].shape == (4, 2, 16)


def test_the_consistency_loss_is_the_change_of_the_answer_state() -> None:
    cfg = make_cfg(h_cycles=1, l_cycles=1)
    params, loop = reference_params(cfg), make_loop(supervision_steps=4, consistency_weight=0.5)
    step, plain = jax.jit(puzzle.loss(cfg, loop)), jax.jit(puzzle.loss(cfg, make_loop(supervision_steps=4)))
    batch = incoming(0) | {"min_steps": np.full(reference.BATCH, 9, np.int32)}
    first, carry = step(params, batch, puzzle.initial_carry(cfg, reference.BATCH))
    assert float(first["consistency"].total) == 0  # the initial state is no answer
    second, after = step(params, batch, carry)
    without, _ = plain(params, batch, carry)
    change = ((np.asarray(after.latents.h) - np.asarray(carry.latents.h)) ** 2).mean(axis=(1, 2)).sum()
    assert float(second["consistency"].total) == pytest.approx(change, rel=1e-5)
    assert float(second["loss"].total) == pytest.approx(float(without["loss"].total) + 0.5 * change, rel=1e-5)

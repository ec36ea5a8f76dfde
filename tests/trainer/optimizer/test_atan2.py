"""Optimizers of the recursive model: each against its rule written out in NumPy and float64."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from pydantic import TypeAdapter

from conf.schema.training.optimizer import Optimizer
from tests.groups import load_group
from tests.paths import ROOT
from tests.trainer.models.test_trm import make_trm
from tests.trainer.models.trm_reference import uniform
from trainer.distributed.checksums import leaf_path
from trainer.models import weights
from trainer.optimizer.chain import build_optimizer
from trainer.step import train_step

LR, DECAY, B1, B2 = 0.01, 0.5, 0.9, 0.95
KNOWN = ROOT / "tests" / "trainer" / "fixtures" / "trm.npz"


def read(name: str, warmup_steps: int = 2, **changes: Any) -> Any:
    schedule = {"kind": "constant", "warmup_steps": warmup_steps}
    plain = {"lr": LR, "weight_decay": DECAY, "schedule": schedule, "max_grad_norm": None}
    return TypeAdapter(Optimizer).validate_python(load_group(f"optimizer/{name}") | plain | changes)


def adam_atan2(t: int, p: Any, g: Any, m: Any, v: Any, rate: float) -> Any:
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
    p = p * (1 - rate * DECAY)
    return p - rate / (1 - B1**t) * np.arctan2(m, np.sqrt(v) / np.sqrt(1 - B2**t)), m, v


def lion(t: int, p: Any, g: Any, m: Any, v: Any, rate: float) -> Any:
    step = np.sign(B1 * m + (1 - B1) * g)
    return p * (1 - rate * DECAY) - rate * step, B2 * m + (1 - B2) * g, v


@pytest.mark.parametrize(("name", "rule"), [("adam_atan2", adam_atan2), ("lion", lion)])
def test_updates_follow_the_rule_written_out(name: str, rule: Any) -> None:
    """Constants never change; the puzzle embedding steps by the sign."""
    cfg, groups = make_trm(), [{"match": "puzzle_embedding", "algorithm": "sign_sgd", "weight_decay": 0.25}]
    chain = build_optimizer(read(name, b1=B1, b2=B2, param_groups=groups), cfg)
    leaves, tree = jax.tree.flatten(weights.abstract_params(cfg))
    names = [leaf_path(path) for path, _ in jax.tree.leaves_with_path(weights.abstract_params(cfg))]
    made = [uniform(i, x.shape) for i, x in enumerate(leaves)]
    params = tree.unflatten(made)
    wanted: dict[str, Any] = {n: (x.astype(np.float64), 0.0, 0.0) for n, x in zip(names, made, strict=True)}
    state, update = chain.init(params), jax.jit(chain.update)
    for t in (1, 2, 3):
        gradients = [uniform(1000 * t + i, x.shape) for i, x in enumerate(leaves)]
        changes, state = update(tree.unflatten(gradients), state, params)
        params = optax.apply_updates(params, changes)
        rate = LR * min(1, t / 2)
        for path, g in zip(names, gradients, strict=True):
            p, m, v = wanted[path]
            if path == "puzzle_embedding":
                wanted[path] = p * (1 - rate * 0.25) - rate * np.sign(g), m, v
            elif not path.startswith("initial"):
                wanted[path] = rule(t, p, g.astype(np.float64), m, v, rate)
        for path, x in zip(names, jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(x, wanted[path][0], rtol=0, atol=1e-6, err_msg=f"{t} {path}")


def test_the_sign_step_is_that_of_the_authors_code() -> None:
    """Rows of a table that no puzzle of the batch uses stay as they are: they do not decay."""
    cfg = make_trm(num_identifiers=5, puzzle_dim=3)
    groups = [{"match": "puzzle_embedding", "algorithm": "sign_sgd"}]
    chain = build_optimizer(read("adam_atan2", 0, param_groups=groups), cfg)
    with np.load(KNOWN) as known:
        params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), weights.abstract_params(cfg))
        params["puzzle_embedding"] = known["sign_sgd/start"]
        state, update = chain.init(params), jax.jit(chain.update)
        for step in (0, 1):
            gradients = jax.tree.map(np.zeros_like, params)
            np.add.at(gradients["puzzle_embedding"], known[f"sign_sgd/{step}/ids"], known[f"sign_sgd/{step}/rows"])
            changes, state = update(gradients, state, params)
            params = optax.apply_updates(params, changes)
            np.testing.assert_allclose(params["puzzle_embedding"], known[f"sign_sgd/{step}/table"], rtol=0, atol=1e-6)


def test_an_average_of_constant_rate_decays_at_that_rate_from_the_start() -> None:
    opt = read("adam_atan2", ema_decay=0.9)
    state = train_step.State(np.int32(0), None, None, np.int32(0), {"w": np.float32(1)})
    assert float(train_step._update_average(state, {"w": np.float32(2)}, opt)["w"]) == pytest.approx(1.1)
    warmed = train_step._update_average(state, {"w": np.float32(2)}, read("adam_atan2", ema_decay=0.9, ema_warmup=True))
    assert float(warmed["w"]) == pytest.approx(1 + 9 / 11)

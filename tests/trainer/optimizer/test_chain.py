"""Optimizers of the recursive model: each against its rule written out in NumPy and float64."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from pydantic import TypeAdapter

from conf.schema.training.model import Model
from conf.schema.training.optimizer import Muon, Optimizer
from tests.groups import load_group
from tests.paths import ROOT
from tests.trainer.models.test_trm import make_trm
from tests.trainer.models.trm_reference import uniform
from trainer.distributed.checksums import leaf_path
from trainer.models import weights
from trainer.optimizer.chain import build_optimizer
from trainer.optimizer.rules import map_with_path
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


COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


class ReferenceMuon:
    """Of one matrix."""

    def __init__(self, lr: float, weight_decay: float) -> None:
        self.lr, self.weight_decay = lr, weight_decay
        self.buffer = self.second = 0.0

    def step(self, weight: np.ndarray, gradient: np.ndarray, done: int, lr_share: float, decay_share: float):
        """The weight after one more update. done: updates before it."""
        momentum = 0.85 + 0.1 * min(done / 300, 1)
        self.buffer = momentum * self.buffer + (1 - momentum) * gradient
        x = (1 - momentum) * gradient + momentum * self.buffer

        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (np.linalg.norm(x) * 1.02 + 1e-6)
        for a, b, c in COEFFICIENTS:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if tall else x

        axis = 1 if x.shape[0] >= x.shape[1] else 0
        mean = (x**2).mean(axis=axis, keepdims=True)
        self.second = 0.95 * self.second + 0.05 * mean
        size = np.maximum(self.second, 1e-10) ** -0.5
        before, after = (np.sqrt(part.sum() * x.shape[axis]) for part in (mean, mean * size**2))
        x = x * size * before / after

        lr = self.lr * lr_share * max(1.0, x.shape[0] / x.shape[1]) ** 0.5
        keeps_sign = x * weight >= 0
        return weight - lr * x - lr * self.weight_decay * decay_share * weight * keeps_sign


class ReferenceAdam:
    """Of one array, with betas 0.8 and 0.95 and no weight decay."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.first = self.second = 0.0

    def step(self, weight: np.ndarray, gradient: np.ndarray, done: int, lr_share: float):
        """The weight after one more update. done: updates before it."""
        self.first = 0.8 * self.first + 0.2 * gradient
        self.second = 0.95 * self.second + 0.05 * gradient**2
        bias1, bias2 = 1 - 0.8 ** (done + 1), 1 - 0.95 ** (done + 1)
        return weight - self.lr * lr_share * (self.first / bias1) / (np.sqrt(self.second / bias2) + 1e-10)


SIZES = {"num_layers": 2, "dim": 24, "num_heads": 3, "num_kv_heads": 3, "head_dim": 6, "mlp_dim": 40, "vocab_size": 50}
HORIZON = 10


def preset(**changes) -> Muon:
    """In float32, over 10 updates."""
    raw = load_group("optimizer/nanochat") | {"orthogonalization_dtype": "float32"} | changes
    raw["schedule"] |= {"horizon_steps": HORIZON, "decay_steps": 4}
    raw["weight_decay_schedule"] |= {"horizon_steps": HORIZON}
    return Muon.model_validate(raw)


def as_torch(path: str, layer: np.ndarray) -> np.ndarray:
    """A layer's weight as nanochat has it: [outputs, inputs]."""
    name = path.removeprefix("layers.")
    if name in ("query", "key", "value"):
        return layer.reshape(layer.shape[0], -1).T
    if name == "output":
        return layer.reshape(-1, layer.shape[-1]).T
    return layer.T


def test_updates_equal_those_written_out():
    """All ten of a run: warm-down of the learning rate, rising momentum, falling weight decay."""
    cfg = Model(**load_group("model/nanochat_d16") | SIZES)
    opt = preset()
    params = jax.jit(weights.init_params, static_argnums=0)(cfg, jax.random.key(0))
    params["layers"] |= {name: 0.1 + params["layers"][name] for name in ("output", "down")}  # they begin at 0
    chain = build_optimizer(opt, cfg)
    state, step = chain.init(params), jax.jit(chain.update)
    expected = {path: np.float64(x) for path, x in flat(params).items()}
    known: dict[str, list] = {path: algorithms(path, x, cfg) for path, x in expected.items()}
    for done in range(HORIZON):
        random = np.random.default_rng(done)
        gradients = jax.tree.map(lambda x, draw=random.normal: draw(size=x.shape).astype(np.float32) * 0.1, params)
        changes, state = step(gradients, state, params)
        params = optax.apply_updates(params, changes)
        lr_share = 1.0 if done <= 6 else (HORIZON - done) / 4
        for path, gradient in flat(gradients).items():
            advance(path, expected, np.float64(gradient), known[path], done, lr_share)
        for path, found in flat(params).items():
            np.testing.assert_allclose(found, expected[path], atol=2e-5, rtol=2e-5, err_msg=f"{path}, update {done}")


def flat(tree) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    map_with_path(lambda path, x: found.setdefault(path, np.asarray(x)), tree)
    return found


def algorithms(path: str, weight: np.ndarray, cfg: Model) -> list:
    """One per matrix of the layers; one for any other weight."""
    width = (cfg.dim / 768) ** -0.5
    rates = {"embedding": 0.3 * width, "unembedding": 0.004 * width}
    rates |= {"layers.residual_scale": 0.005, "layers.embedding_scale": 0.5}
    if path in rates:
        return [ReferenceAdam(rates[path])]
    return [ReferenceMuon(0.02, 0.2 * (12 / cfg.num_layers) ** 2) for _ in range(cfg.num_layers)]


def advance(path: str, expected: dict, gradient: np.ndarray, known: list, done: int, lr_share: float) -> None:
    if isinstance(known[0], ReferenceAdam):
        expected[path] = known[0].step(expected[path], gradient, done, lr_share)
        return
    for i, algorithm in enumerate(known):
        old, slope = (as_torch(path, x[i]) for x in (expected[path], gradient))
        new = algorithm.step(old, slope, done, lr_share, 1 - done / HORIZON)
        expected[path][i] = new.T.reshape(expected[path][i].shape)

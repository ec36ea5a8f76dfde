"""The nanochat preset against its formulas written out, on the weights of a small nanochat.

They are those of its Muon and AdamW of January 2026, in NumPy and float64, matrix by matrix: [outputs, inputs].
"""

import jax
import numpy as np
import optax

from conf.schema.training.model import Model
from conf.schema.training.optimizer import Muon
from tests.groups import load_group
from trainer.models import weights
from trainer.optimizer.chain import build_optimizer
from trainer.optimizer.rules import map_with_path

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

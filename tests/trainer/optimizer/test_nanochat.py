"""The nanochat preset against its formulas written out, on the weights of a small nanochat."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from conf.schema.training.model import Model
from conf.schema.training.optimizer import Muon
from tests.groups import load_group
from tests.trainer.optimizer import written_out
from trainer.models import weights
from trainer.optimizer.chain import build_optimizer
from trainer.optimizer.rules import map_with_path

SIZES = {"num_layers": 4, "dim": 24, "num_heads": 3, "num_kv_heads": 3, "head_dim": 6, "mlp_dim": 40, "vocab_size": 50}
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
        gradients = jax.tree.map(
            lambda x, done=done: jax.random.normal(jax.random.key(done), x.shape, jnp.float32) * 0.1, params
        )
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
        return [written_out.ReferenceAdam(rates[path])]
    return [written_out.ReferenceMuon(0.02, 0.2 * (12 / cfg.num_layers) ** 2) for _ in range(cfg.num_layers)]


def advance(path: str, expected: dict, gradient: np.ndarray, known: list, done: int, lr_share: float) -> None:
    if isinstance(known[0], written_out.ReferenceAdam):
        expected[path] = known[0].step(expected[path], gradient, done, lr_share)
        return
    for i, algorithm in enumerate(known):
        old, slope = (as_torch(path, x[i]) for x in (expected[path], gradient))
        new = algorithm.step(old, slope, done, lr_share, 1 - done / HORIZON)
        expected[path][i] = new.T.reshape(expected[path][i].shape)

"""Updates of each kind against those that torch and transformers computed: fixtures/make_optimizers.py."""

import jax
import numpy as np
import optax
import pytest
from pydantic import TypeAdapter

from conf.schema.training.model import Model
from conf.schema.training.optimizer import Optimizer
from tests.groups import load_group
from tests.paths import ROOT
from trainer.models import weights
from trainer.optimizer.chain import build_optimizer
from trainer.optimizer.rules import map_with_path

KNOWN = ROOT / "tests" / "trainer" / "fixtures" / "optimizers.npz"
SIZES = {"num_layers": 2, "dim": 12, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "mlp_dim": 20, "vocab_size": 16}
PLAIN = {"schedule": {"kind": "constant", "warmup_steps": 0}, "max_grad_norm": None}
REST = {"lr": 0.01, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
MUON = {"lr": 0.02, "adamw": REST, "orthogonalization_dtype": "float32", "weight_decay": 0.1}
SCALED = {"lr": 0.01, "scale_by_weight": True, "update_clip": 0.5, "b1": 0.9}
CASES = {
    "adamw": ("adamw", {"lr": 0.01, "weight_decay": 0.1}),
    "adafactor": ("adafactor", {"lr": 0.01, "weight_decay": 0.1}),
    "adafactor_scaled": ("adafactor", SCALED),
    "muon": ("muon", MUON | {"shape_scale": "aspect"}),
    "muon_like_adamw": ("muon", MUON),
}


@pytest.mark.parametrize("case", CASES)
def test_updates_equal_those_of_torch_and_transformers(case):
    name, changes = CASES[case]
    cfg = Model(**load_group("model/gpt2") | SIZES | {"tie_word_embeddings": True})
    opt = TypeAdapter(Optimizer).validate_python(load_group(f"optimizer/{name}") | PLAIN | changes)
    chain = build_optimizer(opt, cfg)
    with np.load(KNOWN) as known:
        params = taken(known, "start", weights.abstract_params(cfg))
        state, update = chain.init(params), jax.jit(chain.update)
        for n in range(4):
            changes, state = update(taken(known, f"gradient/{n}", params), state, params)
            params = optax.apply_updates(params, changes)
            if n in (0, 3):  # what the fixture keeps
                compare(known, f"{case}/{n}/", params)


def taken(known, prefix: str, like):
    """The tree of the model; weights that the fixture does not have are 0."""

    def read(path: str, x) -> np.ndarray:
        entry = f"{prefix}/{path}"
        return known[entry] if entry in known else np.zeros(x.shape, np.float32)

    return map_with_path(read, like)


def compare(known, prefix: str, params) -> None:
    """Every entry of the fixture under the prefix with the weight of its name."""
    found = {}
    map_with_path(lambda path, x: found.update({prefix + path: x}), params)
    entries = [entry for entry in known if entry.startswith(prefix)]
    assert entries
    for entry in entries:
        np.testing.assert_allclose(found[entry], known[entry], atol=2e-6, rtol=2e-6, err_msg=entry)

"""What a family may have, though its published models mostly do not, against transformers: biases, yarn, windows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from conf.hugging_face.config_json import model_from_config
from conf.schema.training.model import Model, family_switches
from tests.paths import ROOT
from tests.trainer.conftest import make_mesh
from trainer import convert
from trainer.losses import token_logprobs
from trainer.models import decoder, weights
from trainer.pretrained import hf_families, hf_files
from trainer.sampler import Sampler, SamplerSettings, StopCriteria

FIXTURES = ROOT / "tests" / "trainer" / "fixtures"
VARIANTS = ("llama_biases", "qwen2_window", "qwen3_biases", "gemma3_images")
COMPUTED = {"activation_dtype": "float32", "scan_layers": False, "remat": "none", "logit_chunk": 8}


@pytest.fixture(scope="module", params=VARIANTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "expected.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def cfg(name: str) -> Model:
    return model_from_config(hf_files.read_config(epath.Path(FIXTURES / name)), **COMPUTED)


@pytest.fixture(scope="module")
def params(name: str, cfg: Model) -> weights.Params:
    return jax.tree.map(jnp.asarray, hf_files.read_params(epath.Path(FIXTURES / name), cfg))


def test_logits_and_gradients_equal_the_reference(expected, cfg, params):
    tokens = expected["tokens"]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    counted = np.ones_like(tokens)
    counted[:, -1] = 0  # the last token has no successor

    def loss(params: weights.Params) -> tuple[jax.Array, jax.Array]:
        hidden = decoder.forward(params, cfg, tokens, positions)
        total = token_logprobs.cross_entropy(hidden, params, np.roll(tokens, -1, axis=1), counted, cfg)
        return total / counted.sum(), decoder.unembed(params, cfg, hidden)

    (found, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found, expected["loss"], rtol=1e-6)
    norm = np.sqrt(sum(float(jnp.vdot(g, g)) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(norm, expected["gradient_norm"], rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS[:2], indirect=True)
def test_greedy_replies_equal_the_reference(name, expected, cfg, params):
    lengths, count = expected["prompt_lengths"], expected["generated"].shape[1]
    prompts = [row[:length].tolist() for row, length in zip(expected["prompts"], lengths, strict=True)]
    sampler = Sampler(cfg, SamplerSettings(max(lengths), count, slots=8, chunk=5), make_mesh(1, 1, 1), StopCriteria(()))
    drawn = sampler.generate(sampler.load_params(params), prompts, 1, jax.random.key(0), 0.0)
    found = {one.row: one.tokens for one in drawn}
    assert len(np.unique(expected["generated"])) > 4
    np.testing.assert_array_equal([found[row] for row in range(len(prompts))], expected["generated"])


def test_an_export_is_what_transformers_has_loaded(name, cfg, params, tmp_path):
    """fixtures/check_exports.py has loaded exported_config.json with these tensors, and compared logits and replies."""
    assert convert.main(["import", str(FIXTURES / name), str(tmp_path / "in")]) == 0
    assert convert.main(["export", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/config.json").read_text() == (FIXTURES / name / "exported_config.json").read_text()
    again = model_from_config(hf_files.read_config(epath.Path(tmp_path / "out")), **COMPUTED)
    assert again == cfg
    read = hf_files.read_params(epath.Path(tmp_path / "out"), again)
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.parametrize(
    ("family", "switches"),
    [
        ("qwen2", {"post_norms": True}),
        ("qwen3", {"biases": "mlp"}),
        ("llama3", {"biases": "attention", "attention_pattern": "LG"}),
        ("gpt2", {"biases": "qkv"}),
        ("gemma3", {"attn_logit_softcap": 50.0}),  # transformers would not apply it
        ("gemma3", {"rope_local_theta": None}),  # transformers would take 10,000
    ],
)
def test_what_a_family_has_not_is_of_no_family(family, switches):
    sizes: dict[str, Any] = dict.fromkeys(
        ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size"), 2
    )
    assert hf_families.family_of(Model(**family_switches(family) | sizes)) == family
    assert hf_families.family_of(Model(**family_switches(family) | sizes | switches)) is None

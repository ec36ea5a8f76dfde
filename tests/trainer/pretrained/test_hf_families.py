"""Which settings a family may have; exports of those that its published models mostly do not have."""

from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from conf.hugging_face.config_json import model_from_config
from conf.schema.training.model import Model, family_switches
from tests.trainer.models.reference_models import FIXTURES, VARIANTS, described, params_of
from trainer import convert
from trainer.pretrained import hf_families, hf_files


@pytest.mark.parametrize("name", VARIANTS)
def test_an_export_is_what_transformers_has_loaded(name, tmp_path):
    """fixtures/make_models.py has loaded exported_config.json with these tensors, and compared logits and replies."""
    assert convert.main(["import", str(FIXTURES / name), str(tmp_path / "in")]) == 0
    assert convert.main(["export", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/config.json").read_text() == (FIXTURES / name / "exported_config.json").read_text()
    out = epath.Path(tmp_path / "out")
    again = model_from_config(hf_files.read_config(out), activation_dtype="float32")
    assert again == described(name)
    jax.tree.map(np.testing.assert_array_equal, hf_files.read_params(out, again), params_of(name))


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

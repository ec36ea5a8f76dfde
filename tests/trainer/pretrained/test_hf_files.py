"""Every tensor of a checkpoint is read, skipped for a reason, or named: none is dropped in silence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file, save_file

from conf.config_json import model_from_config
from conf.schema.training.model import Model, family_switches
from tests.trainer.models.reference_models import FIXTURES, VARIANTS, described, params_of
from trainer import convert
from trainer.models.weights import Params
from trainer.pretrained import hf_families, hf_files
from trainer.pretrained.hf_files import PretrainedError


def read(folder: Path) -> Params:
    path = epath.Path(folder)
    return hf_files.read_params(path, model_from_config(hf_files.read_config(path)))


def copy_with(folder: Path, family: str, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
    """Copy a family's checkpoint of one file with other tensors."""
    folder.mkdir()
    (folder / "config.json").write_bytes((FIXTURES / family / "config.json").read_bytes())
    save_file(change(load_file(FIXTURES / family / hf_files.SINGLE_FILE)), folder / hf_files.SINGLE_FILE)
    return folder


def names_of_transformers_5(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gemma 3 as transformers 5 names its parameters; the published checkpoints have the names of transformers 4."""
    inside = {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower.vision_model."}
    inside |= {"multi_modal_projector.": "model.multi_modal_projector."}
    return {
        next((new + name.removeprefix(old) for old, new in inside.items() if name.startswith(old)), name): value
        for name, value in tensors.items()
    }


def test_gemma_3_with_images_is_read_under_the_names_of_transformers_4_and_5(tmp_path):
    published = load_file(FIXTURES / "gemma3_images" / hf_files.SINGLE_FILE)
    assert {name.split(".")[0] for name in published} == {"language_model", "vision_tower", "multi_modal_projector"}
    other = copy_with(tmp_path / "new", "gemma3_images", names_of_transformers_5)
    assert all(name.startswith("model.") for name in load_file(other / hf_files.SINGLE_FILE))
    jax.tree.map(np.testing.assert_array_equal, read(other), read(FIXTURES / "gemma3_images"))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"], ids=["buffer", "tied output layer"]
)
def test_what_the_decoder_does_not_have_is_skipped(tmp_path, name):
    folder = copy_with(tmp_path / "more", "qwen2", lambda known: known | {name: np.zeros(3, np.int8)})
    jax.tree.map(np.testing.assert_array_equal, read(folder), read(FIXTURES / "qwen2"))


NO_PART = "is of no part of the model that config.json describes"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", NO_PART),  # of FP8
        ("model.layers.3.mlp.up_proj.weight", NO_PART),  # of a layer more than config.json has
        ("score.weight", NO_PART),
        ("norm.weight", "is there twice, under different prefixes"),
    ],
)
def test_a_tensor_of_something_else_is_named(tmp_path, name, words):
    folder = copy_with(tmp_path / "more", "qwen2", lambda known: known | {name: np.zeros(3, np.float32)})
    with pytest.raises(PretrainedError, match=f"{name} {words}"):
        read(folder)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_quantized_weights_are_named_even_without_quantization_config(tmp_path, dtype):
    """FP8 has no NumPy type, so the file's header is rewritten."""
    name = "model.layers.1.mlp.up_proj.weight"
    folder = copy_with(tmp_path / "low", "qwen2", lambda known: known | {name: known[name].astype(np.int8)})
    file = folder / hf_files.SINGLE_FILE
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[name]["dtype"] = dtype
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    with pytest.raises(PretrainedError) as error:
        read(folder)
    assert f"{name} has type {dtype}: quantized weights cannot be read; download the repository" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


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
    names = ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size")
    sizes: dict[str, Any] = dict.fromkeys(names, 2)
    assert hf_families.family_of(Model(**family_switches(family) | sizes)) == family
    assert hf_families.family_of(Model(**family_switches(family) | sizes | switches)) is None

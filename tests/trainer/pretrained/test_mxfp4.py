"""Weights of MXFP4: values beside transformers', and folders that lack a part. test_decoder.py reads a whole model."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from tests.trainer.models.reference_models import FIXTURES, described
from trainer.pretrained import hf_files, mxfp4

FOLDER = FIXTURES / "gpt_oss_mxfp4"
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


def test_values_are_those_of_transformers_in_every_bit():
    """All bytes and nearly all scales; those beyond bfloat16 are infinite."""
    with np.load(FOLDER / "blocks.npz") as file:
        found = mxfp4.dequantized(file["blocks"], file["scales"])
        np.testing.assert_array_equal(found.view(np.int16), file["bits_of_bfloat16"])
        assert len(np.unique(file["blocks"])) > 200


def test_each_value_is_its_float_times_the_power_of_its_block():
    bytes_ = np.arange(256, dtype=np.uint8).reshape(1, 2, 8, 16)
    found = mxfp4.dequantized(bytes_, np.full((1, 2, 8), 128, np.uint8))[0].T.reshape(256, 2)
    magnitudes = np.array([0, 1, 2, 3, 4, 6, 8, 12])
    for byte, pair in enumerate(found):
        wanted = [magnitudes[half & 7] * (-1) ** (half >> 3) for half in (byte & 15, byte >> 4)]
        np.testing.assert_array_equal(pair, wanted)
    none = mxfp4.dequantized(bytes_, np.full((1, 2, 8), 255, np.uint8))
    assert np.isnan(none.astype(np.float32)).all()


def rewritten(folder: Path, change: dict[str, np.ndarray | None]) -> epath.Path:
    """The folder with other tensors, in two files: the parts of a weight are not in the same one."""
    shutil.copytree(FOLDER, folder)
    tensors = dict(hf_files.iter_tensors(epath.Path(FOLDER))) | change
    kept = {name: array for name, array in tensors.items() if array is not None}
    (folder / hf_files.SINGLE_FILE).unlink()
    where = {name: f"{int(name.endswith('_scales'))}.safetensors" for name in kept}
    for file in {*where.values()}:
        hf_files.write_safetensors(
            epath.Path(folder / file), {name: kept[name] for name in kept if where[name] == file}
        )
    (folder / hf_files.INDEX_FILE).write_text(f'{{"weight_map": {where}}}'.replace("'", '"'))
    return epath.Path(folder)


def test_the_parts_of_a_weight_may_be_in_two_files(tmp_path):
    cfg = described("gpt_oss_mxfp4")
    found, wanted = (hf_files.read_params(epath.Path(f), cfg) for f in (rewritten(tmp_path / "two", {}), FOLDER))
    for name, array in wanted["layers"].items():
        np.testing.assert_array_equal(found["layers"][name], array)
    assert found["layers"]["expert_down"].dtype == jnp.bfloat16
    assert found["layers"]["query"].dtype == np.float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({BLOCKS: None}, r"layers\.1\.mlp\.experts\.down_proj has only one of _blocks and _scales"),
        ({BLOCKS: np.zeros((4, 32, 2, 16), np.uint8)}, r"down_proj: blocks uint8 \(4, 32, 2, 16\) and scales uint8"),
        ({BLOCKS: np.zeros((4, 32, 1, 16), np.float32)}, r"down_proj: blocks float32 \(4, 32, 1, 16\) and scales"),
        (
            {"model.layers.0.self_attn.q_proj.weight_blocks": np.zeros(2, np.uint8)},
            "q_proj.weight_blocks is of no part",
        ),
        ({"model.layers.0.self_attn.q_proj.weight": np.zeros((32, 32), np.uint8)}, "has type U8: quantized weights"),
        ({BLOCKS.removesuffix("_blocks"): np.zeros((4, 32, 32), np.float32)}, "has only one of|is there twice"),
    ],
)
def test_what_is_no_such_weight_is_named(tmp_path, change, words):
    with pytest.raises(hf_files.PretrainedError, match=words):
        hf_files.read_params(rewritten(tmp_path / "other", change), described("gpt_oss_mxfp4"))


def test_other_families_have_no_such_weights(tmp_path):
    shutil.copytree(FIXTURES / "qwen3_moe", tmp_path / "moe")
    own = {"model.layers.0.mlp.experts.gate_up_proj_blocks": np.zeros((8, 24, 1, 16), np.uint8)}
    tensors = dict(hf_files.iter_tensors(epath.Path(FIXTURES / "qwen3_moe"))) | own
    hf_files.write_safetensors(epath.Path(tmp_path / "moe" / hf_files.SINGLE_FILE), tensors)
    with pytest.raises(hf_files.PretrainedError, match="gate_up_proj_blocks is of no part of the model"):
        hf_files.read_params(epath.Path(tmp_path / "moe"), described("qwen3_moe"))

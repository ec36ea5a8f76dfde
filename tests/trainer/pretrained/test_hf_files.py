"""Every tensor of a checkpoint is read, skipped for a reason, or named: none is dropped in silence."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file, save_file

from conf.config_json import ARCHITECTURES, model_from_config
from conf.schema.training.model import Model, family_switches
from tests.trainer.models.reference_models import FIXTURES, VARIANTS, described, params_of
from trainer import convert
from trainer.models.weights import Params
from trainer.pretrained import hf_families, hf_files, hf_tensors, store
from trainer.pretrained.hf_files import PretrainedError
from trainer.pretrained.run_weights import StoreError


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


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_qwen_3_5_with_images_and_heads_of_later_tokens_is_read_as_its_decoder(tmp_path, family):
    """As it is published."""

    def wrapped(known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        others = ("mtp.fc", "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.experts.0.up_proj", "model.visual.norm")
        extra = {f"{name}.weight": np.zeros(3, np.float32) for name in others}
        return {name.replace("model.", "model.language_model.", 1): value for name, value in known.items()} | extra

    folder = copy_with(tmp_path / "wrapped", family, wrapped)
    text = json.loads((folder / "config.json").read_text())
    outer = {"model_type": family, "architectures": ARCHITECTURES[family][:1], "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": text["tie_word_embeddings"]}))
    jax.tree.map(np.testing.assert_array_equal, read(folder), read(FIXTURES / family))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_ministral_3_with_images_is_read_as_its_decoder(tmp_path, prefix):
    """The names of published files and of parameters; the head is beside the decoder in both."""

    def wrapped(known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        bare = {name: name.removeprefix("model.") for name in known}
        inside = prefix if prefix.startswith("model.") else f"{prefix}model."
        names = {
            name: f"{inside if name != bare[name] else prefix.removeprefix('model.')}{bare[name]}" for name in bare
        }
        parts = (
            "vision_tower.ln_pre",
            "multi_modal_projector.norm",
            "multi_modal_projector.patch_merger.merging_layer",
        )
        seen = {f"{prefix.partition('language')[0]}{part}.weight": np.zeros(3, np.float32) for part in parts}
        return {names[name]: value for name, value in known.items()} | seen

    folder = copy_with(tmp_path / "wrapped", "ministral3", wrapped)
    text = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "spatial_merge_size": 2}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text, "vision_config": {}}))
    jax.tree.map(np.testing.assert_array_equal, read(folder), read(FIXTURES / "ministral3"))


def test_what_the_decoder_does_not_have_is_skipped(tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.int8)}
    folder = copy_with(tmp_path / "more", "qwen2", lambda known: known | buffer)
    jax.tree.map(np.testing.assert_array_equal, read(folder), read(FIXTURES / "qwen2"))


EMBEDDINGS = {
    "qwen2": "model.embed_tokens.weight",
    "gemma3_images": "language_model.model.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
}


@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
@pytest.mark.parametrize("family", EMBEDDINGS)
def test_the_head_of_a_tied_model_is_its_embedding(tmp_path, family, head):
    """It may be there too, or alone, as safetensors keeps one of two equal tensors."""
    name = EMBEDDINGS[family]
    both = copy_with(tmp_path / "both", family, lambda known: known | {head: known[name].copy()})
    alone = copy_with(tmp_path / "alone", family, lambda known: known | {head: known.pop(name)})
    for folder in (both, alone):
        jax.tree.map(np.testing.assert_array_equal, read(folder), read(FIXTURES / family))


@pytest.mark.parametrize("family", EMBEDDINGS)
@pytest.mark.parametrize(
    "change", [lambda head: head * 1.001, lambda head: head[:-1], lambda head: head.astype(np.float16)]
)
def test_another_head_than_a_tied_config_says_is_not_dropped(tmp_path, family, change):
    """transformers 5 keeps both tensors of such a folder, and version 4 only the embedding."""
    name = EMBEDDINGS[family]
    folder = copy_with(tmp_path / "other", family, lambda known: known | {"lm_head.weight": change(known[name])})
    with pytest.raises(
        PretrainedError, match=r"ties lm_head\.weight to \S+, and the two .* tie_word_embeddings to false"
    ):
        read(folder)


def test_a_head_of_another_dtype_is_compared_by_value(tmp_path):
    name, whole = EMBEDDINGS["qwen2"], np.arange(97 * 32).reshape(97, 32) % 100

    def heads(difference: int) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
        head = (whole + difference).astype(jnp.bfloat16)
        return lambda known: known | {name: whole.astype(np.float16), "lm_head.weight": head}

    assert read(copy_with(tmp_path / "equal", "qwen2", heads(0)))["embedding"].dtype == np.float16
    with pytest.raises(PretrainedError, match="and the two tensors differ"):
        read(copy_with(tmp_path / "other", "qwen2", heads(1)))


def test_a_second_head_is_named(tmp_path):
    heads = ("lm_head.weight", "model.lm_head.weight")
    copies = copy_with(
        tmp_path / "two", "qwen2", lambda known: known | {name: known[EMBEDDINGS["qwen2"]].copy() for name in heads}
    )
    with pytest.raises(PretrainedError, match=r"lm_head\.weight is there twice, in two files or under two prefixes"):
        read(copies)


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        (np.float16, np.float32, np.float32),
        (np.float32, np.float16, np.float32),
        (jnp.bfloat16, np.float32, np.float32),
        (jnp.bfloat16, np.float16, np.float32),
        (np.float16, jnp.bfloat16, np.float32),
        (np.float32, np.float64, np.float64),
        (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_layers_of_several_dtypes_are_neither_rounded_nor_beyond_a_range(tmp_path, family, first, later, expected):
    """float16 ends at 65,504 and bfloat16 has 8 bits."""

    def mixed(known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found, scale = dict(known), 1 if later == np.float16 else 1e5
        for name in known:
            if layer := re.search(r"\.(\d+)\.", name):
                array = known[name] if layer[1] == "0" else known[name] * scale
                found[name] = array.astype(first if layer[1] == "0" else later)
        return found

    folder = copy_with(tmp_path / "mixed", family, mixed)
    written, params = load_file(folder / hf_files.SINGLE_FILE), read(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(params["layers"])} == {np.dtype(expected)}
    cfg = model_from_config(hf_files.read_config(epath.Path(folder)))
    root = "transformer." if family == "gpt2" else "model."
    for tensor in hf_tensors.tensor_mappings(cfg):
        for layer in range(cfg.num_layers if tensor.is_per_layer else 0):
            parts = tensor.read(written[root + tensor.hf_name.format(i=layer)])
            for ours, part in zip(tensor.param_names, parts, strict=True):
                np.testing.assert_array_equal(params["layers"][ours][layer], part.astype(expected))
    assert np.isfinite(jax.tree.leaves(params["layers"])[0].astype(np.float64)).all()


NO_PART = "is of no part of the model that config.json describes"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", NO_PART),  # of FP8
        ("model.layers.3.mlp.up_proj.weight", NO_PART),  # of a layer more than config.json has
        ("score.weight", NO_PART),
        ("norm.weight", "is there twice, in two files or under two prefixes"),
    ],
)
def test_a_tensor_of_something_else_is_named(tmp_path, name, words):
    folder = copy_with(tmp_path / "more", "qwen2", lambda known: known | {name: np.zeros(3, np.float32)})
    with pytest.raises(PretrainedError, match=f"{name} {words}"):
        read(folder)


def sharded(folder: Path, **changes: Any) -> Path:
    """A copy of Qwen 2's checkpoint in two files, and its index."""
    known = load_file(FIXTURES / "qwen2" / hf_files.SINGLE_FILE)
    names = sorted(known)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]} | changes.get("shards", {})
    folder.mkdir()
    (folder / "config.json").write_bytes((FIXTURES / "qwen2/config.json").read_bytes())
    for file, inside in shards.items():
        save_file({name: known[name] for name in inside}, folder / file)
    index = {name: file for file, inside in shards.items() for name in inside} | changes.get("index", {})
    (folder / hf_files.INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return folder


def test_an_index_says_which_files_are_read(tmp_path):
    """It may say more than its files have; one of an earlier form of the model is left alone, as in transformers."""
    expected = read(FIXTURES / "qwen2")
    more = sharded(tmp_path / "more", index={"model.gone.weight": "./a.safetensors"})
    earlier = copy_with(tmp_path / "earlier", "qwen2", dict)
    (earlier / hf_files.INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    for folder in (more, earlier):
        jax.tree.map(np.testing.assert_array_equal, read(folder), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index": {"model.norm.weight": "c.safetensors"}}, "c.safetensors: the shard is missing; download the model"),
        ({"index": {"model.norm.weight": 3}}, "not an index of shards"),
        ({"index": {"model.norm.weight": None}}, "not an index of shards"),
        ({"shards": {"c.safetensors": ["model.norm.weight"]}}, "model.norm.weight is there twice, in two files"),
        ({"shards": {"b.safetensors": []}}, "tensors are missing, such as "),
    ],
)
def test_shards_that_are_not_the_model_are_named(tmp_path, changes, words):
    with pytest.raises(PretrainedError, match=re.escape(words)):
        read(sharded(tmp_path / "split", **changes))


def test_two_forms_of_the_weights_in_one_folder_are_named(tmp_path):
    folder = sharded(tmp_path / "split")
    (folder / hf_files.SINGLE_FILE).write_bytes((FIXTURES / "qwen2" / hf_files.SINGLE_FILE).read_bytes())
    with pytest.raises(PretrainedError, match=r"has model\.safetensors and a\.safetensors; remove what is not this"):
        read(folder)


@pytest.mark.parametrize(
    ("family", "name", "change"),
    [
        ("qwen2", "model.layers.1.self_attn.q_proj.weight", np.ravel),
        ("qwen2", "model.layers.0.self_attn.q_proj.bias", lambda x: x.reshape(2, -1)),
        ("qwen2", "model.layers.0.self_attn.o_proj.weight", lambda x: x[0]),
        ("qwen2", "model.norm.weight", lambda x: x[None]),
        ("gpt2", "transformer.h.0.attn.c_proj.weight", np.ravel),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", np.transpose),
        ("gpt2", "transformer.h.0.attn.c_attn.bias", lambda x: x[:1].reshape(())),
        ("gemma2", "model.embed_tokens.weight", np.transpose),
    ],
)
def test_a_tensor_of_another_shape_is_named(tmp_path, family, name, change):
    def changed(known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return known | {name: np.ascontiguousarray(change(known[name])).reshape(np.shape(change(known[name])))}

    folder = copy_with(tmp_path / "other", family, changed)
    with pytest.raises(PretrainedError, match=r"the shape \S.* does not match config\.json"):
        read(folder)


def test_a_field_that_nobody_knows_is_left_out_where_another_config_json_describes_the_model(tmp_path):
    """`model.config_json` is the way to a model of others whose config.json says more than we know."""
    folder, path = copy_with(tmp_path / "more", "qwen2", dict), epath.Path(tmp_path / "more")
    config = hf_files.read_config(path)
    cfg = model_from_config(config)
    (folder / "config.json").write_text(json.dumps(config | {"mystery": 3}))
    with pytest.raises(StoreError, match="mystery: unknown to qwen2; remove what does not change what the model"):
        store.read_params(path, cfg)
    told = cfg.model_copy(update={"config_json": "elsewhere"})
    jax.tree.map(np.testing.assert_array_equal, store.read_params(path, told), read(FIXTURES / "qwen2"))
    (folder / "config.json").write_text(json.dumps(config | {"mystery": 3, "rms_norm_eps": 1e-3}))
    with pytest.raises(StoreError, match=r"model\.norm_eps: is "):
        store.read_params(path, told)


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
        ("llama3", {"biases": "attention", "qk_norm": "after_rotation"}),
        ("gpt2", {"biases": "qkv"}),
        ("gemma3", {"attn_logit_softcap": 50.0}),  # transformers would not apply it
        ("gemma3", {"rope_local_theta": None}),  # transformers would take 10,000
        ("olmo3", {"rope_local_theta": None}),
        ("olmo2", {"qk_norm": "before_rotation"}),
        ("ministral3", {"biases": "qkv"}),  # transformers would not scale the queries of a Qwen2
        ("granite", {"attention_pattern": "LG"}),
        ("phi3", {"partial_rotary_factor": 0.5, "biases": "qkv"}),
        ("smollm3", {"residual_multiplier": 0.5, "attention_pattern": "Gg"}),
    ],
)
def test_what_a_family_has_not_is_of_no_family(family, switches):
    names = ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size")
    sizes: dict[str, Any] = dict.fromkeys(names, 2) | {"head_dim": 4}
    assert hf_families.family_of(Model(**family_switches(family) | sizes)) == family
    assert hf_families.family_of(Model(**family_switches(family) | sizes | switches)) is None

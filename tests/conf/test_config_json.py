"""config.json is understood wholly or refused by the name of the field."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from conf.config_json import ARCHITECTURES, FAMILIES, UnknownArchitectureError, model_from_config
from conf.hugging_face_fields import FIELDS
from conf.schema.training.model import Model
from tests.conftest import deep

TEXT = sorted(FIELDS.keys() - {"gemma3"})
ROTARY = sorted(FIELDS.keys() - {"gemma3", "gpt2"})
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def read(kind: str, **fields: Any) -> Model:
    return model_from_config({"model_type": kind, **fields})


def refusal(kind: str, **fields: Any) -> str:
    with pytest.raises(UnknownArchitectureError) as error:
        read(kind, **fields)
    message = str(error.value)
    assert message.startswith("config.json: ")
    assert len(message.splitlines()) == 1
    return message


def test_absent_fields_have_the_defaults_of_the_class():
    """As LlamaConfig(), Gemma2Config() and Gemma3TextConfig() of transformers; the table has the others."""
    llama, gemma3 = read("llama", num_attention_heads=16), read("gemma3_text")
    assert (llama.num_kv_heads, llama.head_dim, llama.norm_eps, llama.rope_theta) == (16, 256, 1e-6, 10000.0)
    assert (gemma3.rope_theta, gemma3.rope_local_theta, gemma3.sliding_window) == (1e6, 1e4, 4096)
    assert (gemma3.attention_pattern, read("gemma2").attention_pattern) == ("LLLLLG", "LG")
    assert (read("qwen3").head_dim, read("qwen2").head_dim, read("gpt2").mlp_dim) == (128, 128, 3072)


@pytest.mark.parametrize("kind", TEXT)
def test_every_field_that_must_have_a_value_is_refused_with_another(kind):
    """What changes nothing is accepted, what is unknown is refused by name."""
    fixed = {name for name, field in FIELDS[kind].items() if field.use == "fixed"}
    assert {"quantization_config", "auto_map", "pruned_heads"} < fixed
    for name in fixed:
        words = f"config.json: {name}: {{'other': 1}} is not supported: "
        assert refusal(kind, **{name: {"other": 1}}).startswith(words)
    ignored = {name: "anything" for name, field in FIELDS[kind].items() if field.use == "ignored"}
    assert read(kind, **ignored) == read(kind)
    message = refusal(kind, mystery=3, num_experts=8)
    assert message.startswith(f"config.json: mystery, num_experts: unknown to {kind}; remove from config.json what ")


@pytest.mark.parametrize("kind", TEXT)
def test_every_field_that_is_read_changes_the_model(kind):
    """Otherwise it would be read in name only."""
    layers = FIELDS[kind]["num_hidden_layers" if "num_hidden_layers" in FIELDS[kind] else "n_layer"].default
    others = {
        "layer_types": ["full_attention", "sliding_attention"] * (layers // 2),
        "rope_parameters": {"rope_theta": 77.0},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "hidden_size": 8192, "num_attention_heads": 64, "n_head": 6, "n_embd": 1536, "head_dim": 64, "n_inner": 5,
        "vocab_size": 9, "num_key_value_heads": 1, "sliding_window": 3, "max_window_layers": 2,
    }  # fmt: skip
    given = {"use_sliding_window": True} if kind.startswith("qwen") else {}
    if kind == "gemma3_text":
        others["rope_parameters"] = {"full_attention": {"rope_theta": 77.0}}
    for name, field in FIELDS[kind].items():
        if field.use != "read" or name in ("model_type", "architectures"):
            continue
        value = field.default
        other = others.get(name, not value if isinstance(value, bool) else (value or 1) / 2)
        other = int(other) if isinstance(other, float) and other == int(other) else other
        start = {} if name == "use_sliding_window" else given
        assert read(kind, **start | {name: other}) != read(kind, **start), name


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_both_spellings_of_rotary_parameters_give_the_same_model(kind):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    for scaled in ({"rope_type": "llama3", **scaling}, {"rope_type": "linear", "factor": 3.0}, YARN, {}):
        new = read(kind, rope_parameters={"rope_type": "default", **scaled, "rope_theta": 5e5})
        old = read(kind, rope_theta=5e5, rope_scaling=scaled or None)
        older = {"type" if key == "rope_type" else key: value for key, value in scaled.items()}
        both = read(kind, rope_parameters={**scaled, "rope_theta": 5e5}, rope_theta=5e5, rope_scaling=older or None)
        assert new == old == both
        assert (new.rope_scaling is None) == (not scaled)


def test_local_layers_have_their_own_rotary_parameters():
    def parameters(**local: Any) -> dict[str, Any]:
        return {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": local}

    found = read("gemma3_text", rope_parameters=parameters(rope_type="default", rope_theta=50.0))
    assert (found.rope_local_theta, found.rope_theta) == (50.0, 1e6)
    assert found.rope_scaling is not None
    assert read("gemma3_text", rope_scaling={"type": "linear", "factor": 8.0}, rope_local_base_freq=50.0) == found
    message = refusal("gemma3_text", rope_parameters=parameters(rope_type="linear", factor=2.0))
    assert "rope_parameters.sliding_attention: " in message
    assert "is not supported: the decoder does not scale the positions of local layers" in message
    assert "gemma3_text has one entry per layer type" in refusal("gemma3_text", rope_parameters=YARN)
    assert "llama has one for all layers" in refusal("llama", rope_parameters=parameters())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic' is not supported: only"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type linear: factor is missing"),
        ({"rope_scaling": YARN | {"short_factor": [1.0]}}, "rope_type yarn: 'short_factor' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e5}, "rope_theta": 1e4}, "rope_theta: 10000.0 is not supported"),
        ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2}}, "rope_parameters has other values"),
        ({"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "'partial_rotary_factor' is not supported"),
        ({"rope_parameters": 3}, "rope_parameters: 3 is not supported: a mapping is required"),
        ({"rope_scaling": YARN | {"factor": "much"}}, "a field of llama has a value of another type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: 'LlamaForSequenceClassification' is"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights cannot be read; download the repository"),
        ({"num_key_value_heads": 5}, "num_heads (32) must be a multiple of num_kv_heads (5)"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps of llama: Input should be a valid number"),
        ({"hidden_size": 100}, "hidden_size (100) is no multiple of num_attention_heads (32)"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers of llama: Input should be a valid integer"),
        ({"hidden_size": "wide"}, "a field of llama has a value of another type"),
        ({"layer_types": ["full_attention"]}, "layer_types: unknown to llama"),
    ],
)
def test_what_llama_cannot_be_is_named(fields, words):
    assert words in refusal("llama", **fields)


def test_layers_that_are_not_ours_are_named():
    for layers in (["full_attention"], 4):
        assert "a list of num_hidden_layers = 32 is required" in refusal("qwen3", layer_types=layers)
    chunked, local = (refusal("qwen3", layer_types=[f"{kind}_attention"] * 32) for kind in ("chunked", "sliding"))
    assert "layer_types: 'chunked_attention' is not supported: only" in chunked
    assert "layer_types has local layers, and there is no sliding_window" in local


def test_windows_of_qwen():
    found = read("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=30)
    assert (found.attention_pattern, found.sliding_window) == ("G" * 30 + "LL", 7)
    for used, window in ((False, 7), (True, None)):
        assert read("qwen2", use_sliding_window=used, sliding_window=window) == read("qwen2")


def test_yarn_has_the_attention_factor_of_transformers():
    """0.1 ln 4 + 1, and DeepSeek's ratio of two of them."""

    def factor(**fields: Any) -> float:
        scaling = read("llama", rope_scaling=YARN | fields).rope_scaling
        assert scaling is not None
        assert scaling.kind == "yarn"
        return scaling.attention_factor

    assert factor() == pytest.approx(1.1386294)
    assert factor(mscale=2.0, mscale_all_dim=1.0) == pytest.approx(1.2772589 / 1.1386294)
    assert factor(attention_factor=1.5) == 1.5
    assert factor(factor=1.0) == 1.0


def test_gemma_3_with_images_is_read_as_its_decoder():
    text = {"hidden_size": 64, "num_hidden_layers": 2, "sliding_window": 8}
    found = model_from_config({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}})
    assert found == read("gemma3_text", **text)
    assert "text_config.mystery: unknown to gemma3_text" in refusal("gemma3", text_config={"mystery": 1})
    assert "hidden_size: unknown to gemma3;" in refusal("gemma3", hidden_size=64)
    assert "text_config has another value" in refusal("gemma3", text_config={"tie_word_embeddings": False})
    assert "text_config: [1] is not supported: a mapping is required" in refusal("gemma3", text_config=[1])
    capped = {"final_logit_softcapping": 30}
    assert "transformers does not apply it with images" in refusal("gemma3", text_config=capped)


VALUES = (None, True, -1, 1e300, "text", [1], {"a": 1}, {"rope_type": []})


@pytest.mark.parametrize("kind", ["llama", *deep(*sorted(FIELDS.keys() - {"llama"}))])
def test_any_value_of_any_field_gives_a_model_or_its_own_error(kind):
    for name in FIELDS[kind]:
        for value in VALUES:
            with suppress(UnknownArchitectureError):
                assert isinstance(model_from_config({"model_type": kind} | {name: value}), Model)


RECORDED = json.loads(Path(__file__).with_name("config_classes.json").read_text())
"""By version and model_type; `make_config_classes.py` wrote it."""


def differences(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config class that its table lacks or gives another default."""
    table = FIELDS[kind]
    of_file = {"model_type", "transformers_version"}
    return {
        name: (default, table[name].default if name in table else "not in the table")
        for name, default in fields.items()
        if name not in of_file and (name not in table or table[name].default != default)
    }


@pytest.mark.parametrize("kind", FIELDS)
def test_the_table_has_every_field_and_default_of_the_class(kind):
    for version, classes in RECORDED.items():
        assert len(classes[kind]) > 10
        assert differences(kind, classes[kind]) == {}, version
    assert not [name for name, field in FIELDS[kind].items() if (field.use == "read") == bool(field.note)], "says why"


def test_the_table_fits_the_installed_transformers():
    pytest.importorskip("transformers")
    from tests.conf.make_config_classes import described

    assert {kind: found for kind, fields in described().items() if (found := differences(kind, fields))} == {}


def test_the_recording_has_both_spellings_of_rotary_parameters():
    assert {version.split(".")[0] for version in RECORDED} == {"4", "5"}
    for version, classes in RECORDED.items():
        wanted = {"4": {"rope_theta"}, "5": {"rope_parameters"}}[version.split(".")[0]]
        assert all(wanted <= classes[kind].keys() for kind in ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text"))

    assert FIELDS.keys() == FAMILIES.keys() | {"gemma3"} == ARCHITECTURES.keys()

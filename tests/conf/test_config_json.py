"""config.json is understood wholly or refused by the name of the field."""

import math
from contextlib import suppress
from typing import Any

import pytest

from conf.config_json import (
    WITH_IMAGES,
    UnknownArchitectureError,
    model_from_config,
    without_unknown_fields,
)
from conf.hugging_face_fields import FIELDS, OTHER_TYPES
from conf.hugging_face_gemma4 import GEMMA4_TEXT
from conf.schema.training.model import Model
from tests.conftest import deep

TEXT = sorted(FIELDS.keys() - WITH_IMAGES.keys())
ROTARY = sorted({*TEXT} - {"gpt2"})
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MINISTRAL3 = YARN | {"rope_theta": 77.0, "llama_4_scaling_beta": 0.3}


ROTATIONS_OF_GEMMA4 = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
NEEDED = {"olmo3": {"rope_theta": 500_000.0}}
"""What no default can say, because that of transformers 4 is not that of 5."""


GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


def read(kind: str, **fields: Any) -> Model:
    return model_from_config({"model_type": kind, **NEEDED.get(kind, {}), **fields})


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
    message = refusal(kind, mystery=3, num_moe_layers=8)
    assert message.startswith(
        f"config.json: mystery, num_moe_layers: unknown to {kind}; remove what does not change what "
    )
    assert "set model.config_json to a copy without it" in message


@pytest.mark.parametrize("kind", TEXT)
def test_every_field_that_is_read_changes_the_model(kind):
    """Otherwise it would be read in name only."""
    layers = FIELDS[kind]["num_hidden_layers" if "num_hidden_layers" in FIELDS[kind] else "n_layer"].default
    given: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7}
    given = given if FIELDS[kind].get("use_sliding_window", FIELDS[kind]["model_type"]).type_ is bool else {}
    others = {
        "layer_types": ["full_attention", "sliding_attention"] * (layers // 2),
        "rope_parameters": {"rope_theta": 77.0},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "hidden_size": 8192, "num_attention_heads": 64, "n_head": 6, "n_embd": 1536, "head_dim": 80, "n_inner": 5,
        "vocab_size": 9, "num_key_value_heads": 1, "sliding_window": 3, "max_window_layers": 2,
        "no_rope_layers": [1, 0] * (layers // 2),
    }  # fmt: skip
    if kind == "gemma3_text":
        others["rope_parameters"] = {"full_attention": {"rope_theta": 77.0}}
    if kind == "olmo3":
        others["rope_parameters"] = {"full_attention": {"rope_type": "linear", "factor": 3.0}}
    if kind == "ministral3":
        others["rope_parameters"] = MINISTRAL3
    if kind in GEMMA4_TEXT:
        others |= {"rope_parameters": ROTATIONS_OF_GEMMA4, "per_layer_config": {}, "num_kv_shared_layers": 6}
        others |= {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
        others |= {"global_head_dim": 64, "hidden_size_per_layer_input": 8, "num_global_key_value_heads": 2}
        given = {"attention_k_eq_v": True}
    if kind == "gemma4_text":
        given |= GEMMA4_MOE
        others |= {"enable_moe_block": False, "num_experts": 8, "top_k_experts": 1, "moe_intermediate_size": 9}
    if kind == "gpt_oss":
        others |= {"rope_parameters": YARN, "rope_scaling": YARN, "num_attention_heads": 32}
    if kind == "phi3":
        others["rope_scaling"] = LONGROPE
    if kind in OTHER_TYPES:
        others |= {"layer_types": ["linear_attention", "full_attention"] * (layers // 2), "rope_scaling": YARN}
    for name, field in FIELDS[kind].items():
        if field.use != "read" or name in ("model_type", "architectures"):
            continue
        value = field.default
        another = (lambda value: not value) if isinstance(value, bool) else (lambda value: (value or 1) / 2)
        other = others[name] if name in others else another(value)
        other = (
            int(other) if isinstance(other, float) and other == int(other) and not isinstance(value, float) else other
        )
        start = {key: known for key, known in given.items() if key != name or key in GEMMA4_MOE}
        if (kind, name) == ("olmo3", "rope_theta"):
            continue  # below
        if name == "vocab_size_per_layer_input" or (
            name == "vocab_size" and "hidden_size_per_layer_input" in FIELDS[kind]
        ):
            continue  # both tables have the same rows, below
        if name == "original_max_position_embeddings":
            start = start | {"rope_scaling": LONGROPE}
        assert read(kind, **start | {name: other}) != read(kind, **start), name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic' is not supported: only"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type linear: factor is missing"),
        ({"rope_scaling": YARN | {"short_factor": [1.0]}}, "rope_type yarn: 'short_factor' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e5}, "rope_theta": 1e4}, "rope_theta: 10000.0 is not supported"),
        ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2}}, "rope_parameters has other values"),
        ({"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "'partial_rotary_factor' is not supported"),
        ({"rope_parameters": 3}, "rope_parameters: 3 is not supported: a mapping or null is required"),
        ({"rope_scaling": YARN | {"factor": "much"}}, "rotary factor: 'much' is not supported: a number is required"),
        ({"rope_scaling": YARN | {"factor": True}}, "rotary factor: True is not supported: a number is required"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "rotary truncate: 'no' is not supported: true or false"),
        ({"rope_scaling": YARN | {"beta_fast": [32]}}, "rotary beta_fast: [32] is not supported: a number or null"),
        ({"rope_scaling": YARN | {"factor": "", "truncate": 0, "type": 1}}, "rotary factor: '' is not supported"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "rotary type: 'linear' is not supported: rope_type is 'yarn'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rotary rope_type: ['yarn'] is not supported: a text is required"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: 'LlamaForSequenceClassification' is"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights cannot be read; download the repository"),
        ({"num_key_value_heads": 5}, "num_heads (32) must be a multiple of num_kv_heads (5)"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps: 'tiny' is not supported: a number is required"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps: inf is not supported: a number is required"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: nan is not supported: a number is required"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_interleaved": True}, "the decoder rotates the halves of a head"),
        ({"sliding_window": 4096}, "sliding_window: 4096 is not supported: all layers of a Llama see the whole text"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantized weights cannot be read"),
        ({"is_encoder_decoder": 0}, "is_encoder_decoder: 0 is not supported"),
        ({"hidden_size": 100}, "hidden_size (100) is no multiple of num_attention_heads (32)"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers: 'many' is not supported: a whole number is required"),
        ({"hidden_size": "wide"}, "hidden_size: 'wide' is not supported: a whole number is required"),
        ({"layer_types": ["full_attention"]}, "layer_types: unknown to llama"),
    ],
)
def test_what_llama_cannot_be_is_named(fields, words):
    assert words in refusal("llama", **fields)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("olmo3", {"rope_theta": 1e4}, "rope_theta: 10000.0 is not supported: transformers 4 and 5 read it otherwise"),
        ("olmo3", {"rope_parameters": YARN}, "olmo3 has one entry per layer type"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "a list of num_hidden_layers = 36, 1 or 0, is required"),
        ("smollm3", {"no_rope_layers": [2] * 36}, "1 or 0, is required"),
        ("granite", {"attention_multiplier": -0.5}, "attention_multiplier: -0.5 is not supported: a number above 0"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling of granite: Input should be greater than 0"),
        ("phi3", {"rope_scaling": YARN}, "rope_type: 'yarn' is not supported: only default, longrope"),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "long_factor must have 48 numbers, not 1"),
        (
            "phi3",
            {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 7}},
            "rotary original_max_position_embeddings: 7 is not supported: original_max_position_embeddings is 4096",
        ),
        ("phi3", {"partial_rotary_factor": 0.29}, "partial_rotary_factor x head_dim must be an even number, not "),
        ("phi3", {"auto_map": {"AutoModelForCausalLM": "other.Phi3"}}, "the repository's own code would define"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias: True is not supported: the decoder has none"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod: 2 is not supported: the decoder has none"),
        ("mistral", {"layer_types": ["full_attention"] * 32}, "layer_types: unknown to mistral"),
        (
            "mistral",
            {"rope_parameters": MINISTRAL3},
            "rope_type yarn: 'llama_4_scaling_beta' is not supported: unknown",
        ),
        *(
            (
                "ministral3",
                {"rope_parameters": MINISTRAL3 | {"original_max_position_embeddings": none}},
                "rope_type yarn: original_max_position_embeddings is missing",
            )
            for none in (None, 0)
        ),
        ("ministral3", {"rope_parameters": YARN}, "rope_type yarn: llama_4_scaling_beta is missing"),
        ("ministral3", {"rope_parameters": {}}, "rope_type: 'default' is not supported: only yarn"),
        (
            "ministral3",
            {"rope_parameters": MINISTRAL3 | {"rope_type": "linear"}},
            "'linear' is not supported: only yarn",
        ),
        ("ministral3", {"rope_parameters": MINISTRAL3 | {"llama_4_scaling_beta": "0"}}, "a number is required"),
        ("ministral3", {"rope_parameters": MINISTRAL3 | {"llama_4_scaling_beta": -1.0}}, "greater than or equal to 0"),
        (
            "ministral3",
            {"rope_parameters": MINISTRAL3 | {"rope_theta": None}},
            "rope_theta of ministral3: Input should",
        ),
        (
            "ministral3",
            {"rope_parameters": MINISTRAL3 | {"attention_scale": 1.0}},
            "'attention_scale' is not supported",
        ),
        ("ministral3", {"rope_scaling": YARN}, "is not supported: set it in rope_parameters"),
        ("ministral3", {"layer_types": ["full_attention"] * 34}, "layer_types: unknown to ministral3"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act: 'relu' is not supported"),
        ("gemma4_text", GEMMA4_MOE | {"num_experts": None}, "num_experts: None is not supported: enable_moe_block"),
        ("gemma4_text", GEMMA4_MOE | {"num_experts": 1}, "num_experts of gemma4_text: Input should be greater than"),
        ("gemma4_text", GEMMA4_MOE | {"top_k_experts": 5}, "per_token (5) must be at most count (4)"),
        ("gemma4_text", GEMMA4_MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size of gemma4_text: Input"),
        ("gemma4_text", GEMMA4_MOE | {"enable_moe_block": 1}, "enable_moe_block: 1 is not supported: true or false"),
        ("gemma4_unified_text", GEMMA4_MOE, "moe_intermediate_size: unknown to gemma4_unified_text"),
        ("gemma4_text", {"vocab_size_per_layer_input": 9}, "all tables have the rows of vocab_size"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "'all' is not supported: the decoder is causal"),
        (
            "gemma4_text",
            {"layer_types": ["sliding_attention"] * 30},
            "transformers makes the last layer full_attention",
        ),
        ("gemma4_text", {"per_layer_config": {"5": {"head_dim": 8}}}, "the same of all full_attention layers"),
        ("gemma4_text", {"num_kv_shared_layers": 27}, "leaves no layer with keys for some of the last ones"),
        ("gemma4_text", {"rope_theta": 1e4}, "rope_theta: 10000.0 is not supported: set it in rope_parameters"),
        ("gemma4_unified_text", {"hidden_size_per_layer_input": 8}, "unknown to gemma4_unified_text"),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 32}, "only linear_attention, full_attention"),
        ("qwen3_5_text", {"attention_bias": True}, "attention_bias: True is not supported: queries and their gates"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate: False is not supported: transformers has"),
        ("qwen3_5_text", {"linear_num_value_heads": 24}, "must be a multiple of num_key_heads (16)"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim of qwen3_5_text: Input should be"),
        ("qwen3_5_text", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "only default, yarn"),
        (
            "qwen3_5_moe_text",
            {"norm_topk_prob": False},
            "False is not supported: transformers divides the shares in any",
        ),
        ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, "[0] is not supported: layers without experts are not"),
        (
            "qwen3_5_moe_text",
            {"shared_expert_intermediate_size": 0},
            "size: 0 is not supported: all layers have one of",
        ),
        ("qwen3_5_moe_text", {"shared_expert_intermediate_size": -1}, "size of qwen3_5_moe_text: Input should be"),
        ("qwen3_5_moe_text", {"num_experts": 4}, "num_experts_per_tok: 8 is not supported: num_experts is 4"),
        ("qwen3", {"rope_parameters": {"mrope_section": [1, 1, 1]}}, "'mrope_section' is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers: [0] is not supported: layers without experts are"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step: 2 is not supported: layers without experts"),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 8}, "num_local_experts: 8 is not supported: num_experts"),
        ("qwen3_moe", {"num_experts": 4}, "num_experts_per_tok: 8 is not supported: num_experts is 4"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts of qwen3_moe: Input should be greater than or equal to 2"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size of qwen3_moe: Input should be greater"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window: True is not supported: transformers 4 and 5"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size: 8 is not supported"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit: 5.0 is not supported: the decoder has this one"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha: 1.0 is not supported: the decoder has this one"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "fp8"}},
            "is not supported: only mxfp4 of experts is read",
        ),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4", "x": 1}}, "only mxfp4 of experts is read"),
        ("gpt_oss", {"rope_scaling": None}, "rope_type: 'default' is not supported: only yarn"),
        ("gpt_oss", {"num_local_experts": 0}, "num_local_experts of gpt_oss: Input should be greater than or equal"),
        ("gpt_oss", {"num_local_experts": 3}, "num_experts_per_tok: 4 is not supported: num_local_experts is 3"),
        ("gpt_oss", {"num_experts": 8}, "num_experts: unknown to gpt_oss"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "quantized weights cannot be read"),
    ],
)
def test_what_a_family_cannot_be_is_named(kind, fields, words):
    assert words in refusal(kind, **fields)


def test_layers_may_be_said_to_have_experts_and_their_number_has_two_names():
    """transformers 5 writes num_local_experts."""
    assert read("qwen3_moe", mlp_only_layers=[], decoder_sparse_step=1) == read("qwen3_moe")
    assert read("qwen3_moe", num_experts=64) == read("qwen3_moe", num_local_experts=64)
    assert read("qwen3_moe", num_local_experts=128) == read("qwen3_moe", num_experts=128) == read("qwen3_moe")


def test_a_head_of_a_model_with_experts_has_its_share_of_the_width_unless_the_file_says_another():
    """Transformers' class has no head_dim: its attention divides."""
    assert read("qwen3_moe").head_dim == 2048 // 32
    assert read("qwen3_moe", head_dim=128).head_dim == 128


def test_what_published_files_of_other_families_say():
    """Gemma 1's first files mean the other gelu; Qwen3-Coder's name what it lacks; Microsoft's its own code."""
    assert read("gemma", hidden_act="gelu", hidden_activation=None) == read("gemma")
    coder = {"shared_expert_intermediate_size": 0, "use_qk_norm": True, "qkv_bias": False}
    assert read("qwen3_moe", **coder) == read("qwen3_moe")
    code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert read("phi3", auto_map=code) == read("phi3", auto_map=code | {"AutoTokenizer": "Xenova/gpt-4o"})
    found = read("phi3", max_position_embeddings=131072, rope_scaling=LONGROPE)
    assert found.rope_scaling is not None
    assert found.rope_scaling.kind == "longrope"
    assert found.rope_scaling.attention_factor == pytest.approx(1.1902380714)
    assert (found.max_seq_len, found.max_sampled_len) == (131072, 4096)
    assert read("smollm3", no_rope_layers=[1, 1, 1, 0] * 9) == read("smollm3")
    assert read("mistral", sliding_window=None).attention_pattern == "G"
    assert read("granite", attention_multiplier=0.0078125).query_pre_attn_scalar == 16384


@pytest.mark.parametrize(
    ("kind", "name", "value", "wanted"),
    [
        ("llama", "attention_bias", "yes", "true or false"),
        ("llama", "attention_bias", 1, "true or false"),
        ("llama", "mlp_bias", None, "true or false"),
        ("llama", "tie_word_embeddings", "false", "true or false"),
        ("qwen2", "use_sliding_window", "no", "true or false"),
        ("llama", "num_attention_heads", 4.0, "a whole number"),
        ("llama", "num_attention_heads", "32", "a whole number"),
        ("llama", "num_hidden_layers", True, "a whole number"),
        ("llama", "num_key_value_heads", 8.0, "a whole number or null"),
        ("gemma2", "num_key_value_heads", None, "a whole number"),
        ("gemma2", "query_pre_attn_scalar", 256.0, "a whole number"),
        ("gemma2", "final_logit_softcapping", "30", "a number or null"),
        ("gemma3_text", "sliding_window", 512.0, "a whole number or null"),
        ("gemma3_text", "rope_local_base_freq", "10000", "a number or null"),
        ("qwen3", "layer_types", "full_attention", "a list or null"),
        ("gpt2", "n_inner", 3072.0, "a whole number or null"),
        ("gpt2", "layer_norm_epsilon", False, "a number"),
    ],
)
def test_a_value_of_another_type_than_transformers_takes_is_named(kind, name, value, wanted):
    """Python would take "false" for true, and 4.0 for 4."""
    assert refusal(kind, **{name: value}) == f"config.json: {name}: {value!r} is not supported: {wanted} is required"


@pytest.mark.parametrize("kind", TEXT)
def test_whole_numbers_are_numbers(kind):
    for name, field in FIELDS[kind].items():
        if (
            field.use == "read"
            and isinstance(field.default, float)
            and name not in ("rms_norm_eps", "layer_norm_epsilon", "partial_rotary_factor")
            and (kind, name) != ("olmo3", "rope_theta")
        ):
            assert read(kind, **{name: 20000}) == read(kind, **{name: 20000.0}), name


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "is_llama_config": True, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "vocab_size": 49152, "pretraining_tp": 1,
    "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}},
}  # fmt: skip
"""Keys of a published file that other programs wrote: nanotron and Transformers.js."""


def test_what_other_programs_write_does_not_refuse_a_model():
    own = ("is_llama_config", "rope_interleaved", "transformers.js_config")
    assert read("llama", **SMOLLM2) == read("llama", **{key: SMOLLM2[key] for key in SMOLLM2 if key not in own})
    for kind in ("llama", "qwen2", "gpt2"):
        others = {"unsloth_version": "2026.4.2", "xla_device": None, "_from_model_config": True, "_num_labels": 2}
        assert read(kind, **others) == read(kind)
    assert read("gemma2", sliding_window_size=4096) == read("gemma2")  # google/gemma-2-9b-it
    text = {"hidden_size": 64, "neftune_noise_alpha": 5.0, "temperature": 0.7, "max_length": 20}
    assert read("gemma3", text_config=text) == read("gemma3_text", hidden_size=64)


def test_without_unknown_fields():
    config = {"model_type": "gemma3", "mystery": 1, "text_config": {"hidden_size": 64, "mystery": {"a": 1}}}
    assert without_unknown_fields(config) == {"model_type": "gemma3", "text_config": {"hidden_size": 64}}
    assert without_unknown_fields({"model_type": "llama", "text_config": {}}) == {"model_type": "llama"}
    with pytest.raises(UnknownArchitectureError, match="model_type 'mamba' is not one of"):
        without_unknown_fields({"model_type": "mamba"})


def test_layers_that_are_not_ours_are_named():
    assert "a list of num_hidden_layers = 32 is required" in refusal("qwen3", layer_types=["full_attention"])
    assert "layer_types: ['a'] is not supported: only" in refusal("qwen3", layer_types=[["a"]] * 32)
    chunked, local = (refusal("qwen3", layer_types=[f"{kind}_attention"] * 32) for kind in ("chunked", "sliding"))
    assert "layer_types: 'chunked_attention' is not supported: only" in chunked
    assert "layer_types has local layers, and there is no sliding_window" in local


def test_windows_of_qwen():
    found = read("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=30)
    assert (found.attention_pattern, found.sliding_window) == ("G" * 30 + "LL", 7)
    for used, window in ((False, 7), (True, None)):
        assert read("qwen2", use_sliding_window=used, sliding_window=window) == read("qwen2")


def test_gemma_3_with_images_is_read_as_its_decoder():
    text = {"hidden_size": 64, "num_hidden_layers": 2, "sliding_window": 8}
    found = model_from_config({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}})
    assert found == read("gemma3_text", **text)
    assert "text_config.mystery: unknown to gemma3_text" in refusal("gemma3", text_config={"mystery": 1})
    assert "hidden_size: unknown to gemma3;" in refusal("gemma3", hidden_size=64)
    assert "text_config has another value" in refusal("gemma3", text_config={"tie_word_embeddings": False})
    assert "text_config: [1] is not supported: a mapping or null is required" in refusal("gemma3", text_config=[1])
    assert "text_config.attention_bias: 'no' is not" in refusal("gemma3", text_config={"attention_bias": "no"})
    interleaved = {"rope_interleaved": True}
    assert "text_config.rope_interleaved: True is not supported" in refusal("gemma3", text_config=interleaved)
    capped = {"final_logit_softcapping": 30}
    assert "transformers does not apply it with images" in refusal("gemma3", text_config=capped)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_gemma_4_with_images_and_sound_is_read_as_its_decoder(kind):
    """The cap of the logits is applied there, too; version 5.24 writes the sizes of global layers one by one."""
    text = {"hidden_size": 64, "num_hidden_layers": 6, "final_logit_softcapping": 30.0, "global_head_dim": 128}
    found = read(kind, text_config=text, vision_config={"hidden_size": 8}, audio_config=None)
    assert found == read(f"{kind}_text", **text)
    assert (found.final_logit_softcap, found.global_head_dim, found.attention_pattern) == (30.0, 128, "LLLLLG")
    assert found == read(f"{kind}_text", **text, per_layer_config={"05": {"head_dim": 128}})


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_qwen_3_5_with_images_is_read_as_its_decoder(kind):
    """Text has the same position three times, so mrope's sections are of no use; nor are heads of later tokens."""
    rotation = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    text = {"num_hidden_layers": 8, "linear_num_value_heads": 16, "mtp_num_hidden_layers": 1}
    sections = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    found = read(kind, text_config=text | {"rope_parameters": rotation | sections}, vision_config={"depth": 2})
    assert found == read(f"{kind}_text", **text, rope_parameters=rotation)
    assert (found.attention_pattern, found.partial_rotary_factor, found.sliding_window) == ("DDDG", 0.25, 4096)
    assert read(f"{kind}_text", full_attention_interval=1).delta_net is None
    assert "text_config has another value" in refusal(kind, text_config=text, tie_word_embeddings=True)


def test_ministral_3_with_images_is_read_as_its_decoder():
    """As Mistral3Config: what names no other text is a Mistral; a head of its own is read unless the file ties it."""
    text = {"model_type": "ministral3", "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}
    assert read("mistral3", text_config=text, vision_config={"hidden_size": 8}) == read(
        "ministral3", hidden_size=64, num_hidden_layers=2
    )
    assert read("mistral3", text_config=text | {"tie_word_embeddings": True}, tie_word_embeddings=True)
    assert "text_config has another value" in refusal("mistral3", text_config=text, tie_word_embeddings=True)
    words = "text_config.model_type: 'mistral' is not supported: ministral3 was expected"
    assert words in refusal("mistral3", text_config={}) == refusal("mistral3")
    assert "text_config.mystery: unknown to ministral3" in refusal("mistral3", text_config=text | {"mystery": 1})
    assert "quantized weights cannot be read" in refusal(
        "mistral3", text_config=text, quantization_config={"quant_method": "fp8"}
    )


VALUES = (None, True, -1, 1e300, "text", [1], {"a": 1}, {"rope_type": []})


@pytest.mark.parametrize("kind", ["llama", *deep(*sorted(FIELDS.keys() - {"llama"}))])
def test_any_value_of_any_field_gives_a_model_or_its_own_error(kind):
    for name in FIELDS[kind]:
        for value in VALUES:
            with suppress(UnknownArchitectureError):
                assert isinstance(model_from_config({"model_type": kind} | {name: value}), Model)

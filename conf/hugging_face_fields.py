"""Every field of the config.json of each supported family, its default, and what we do with it.

A field is read, or cannot change what the decoder computes, or must have the value that the decoder has. Other fields
are refused by name. Fields, defaults and types are those of transformers' config classes, versions 4.57 and 5.23, and
every field that a version since 2.0 wrote is known; `tests/conf/test_config_json.py` compares them.
"""

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple


class Field(NamedTuple):
    """One field of config.json."""

    default: Any  # the config class's: what an absent field means
    use: Literal["read", "ignored", "fixed"]
    note: str = ""  # ignored: why it changes no number. fixed: what another value would need
    allowed: tuple[Any, ...] = ()  # values of a fixed field besides its default
    type_: type | UnionType = object  # of a field that is read


def _read(default: Any = None, type_: type | UnionType | None = None) -> Field:
    """Return a field whose values have the default's type, unless another is given. float: also whole numbers."""
    return Field(default, "read", type_=type_ or type(default))


def _ignored(note: str, **defaults: Any) -> dict[str, Field]:
    return {name: Field(default, "ignored", note) for name, default in defaults.items()}


def _fixed(default: Any, note: str, *allowed: Any) -> Field:
    return Field(default, "fixed", note, allowed)


UNQUANTIZED = (
    "quantized weights cannot be read; download the repository that it was made from, which has no quantization_config"
)

GENERATION = _ignored(
    "a setting of generation",
    max_length=20, min_length=0, do_sample=False, early_stopping=False, num_beams=1, temperature=1.0, top_k=50,
    top_p=1.0, typical_p=1.0, repetition_penalty=1.0, length_penalty=1.0, no_repeat_ngram_size=0,
    encoder_no_repeat_ngram_size=0, bad_words_ids=None, num_return_sequences=1, output_scores=False,
    return_dict_in_generate=False, forced_bos_token_id=None, forced_eos_token_id=None, remove_invalid_values=False,
    exponential_decay_length_penalty=None, suppress_tokens=None, begin_suppress_tokens=None, num_beam_groups=1,
    diversity_penalty=0.0, epsilon_cutoff=0.0, eta_cutoff=0.0, cache_implementation=None,
)  # fmt: skip

BASE = {
    "model_type": _read(""),
    "architectures": _read(None, list | None),
    **_ignored(
        "describes the file",
        transformers_version=None, _name_or_path="", name_or_path="", _commit_hash=None, unsloth_fixed=False,
        unsloth_version=None, is_llama_config=True, _from_model_config=False,
    ),
    **_ignored("describes files of other programs", **{"transformers.js_config": None}),
    **_ignored(
        "transformers' own bookkeeping", _post_init_done=False, ignore_keys_at_rope_validation=None,
    ),
    **_ignored("each tensor says its own type", dtype=None, torch_dtype=None),
    **_ignored(
        "what a call returns, not what it computes",
        output_hidden_states=False, output_attentions=False, return_dict=True, torchscript=False, use_cache=True,
        output_past=True, use_return_dict=True,
    ),
    **_ignored(
        "how it is computed, with the same result",
        chunk_size_feed_forward=0, attn_implementation=None, _attn_implementation=None, gradient_checkpointing=False,
        _attn_implementation_autoset=False, use_bfloat16=False, tf_legacy_loss=False, xla_device=None,
        _flash_attn_2_enabled=False, experts_implementation=None, _experts_implementation=None,
    ),
    **_ignored(
        "a head that is not loaded",
        id2label=None, label2id=None, num_labels=None, problem_type=None, finetuning_task=None, classifier_dropout=None,
        task_specific_params=None, _num_labels=None,
    ),
    **_ignored("encoder-decoder models only", is_decoder=False, tie_encoder_decoder=False, decoder_start_token_id=None),
    **_ignored(
        "the tokenizer's",
        tokenizer_class=None, prefix=None, bos_token_id=None, pad_token_id=None, eos_token_id=None, sep_token_id=None,
    ),
    **_ignored("of the initial weights", initializer_range=0.02),
    **GENERATION,
    "is_encoder_decoder": _fixed(False, "the decoder has no encoder"),
    "add_cross_attention": _fixed(False, "the decoder has no cross attention"),
    "cross_attention_hidden_size": _fixed(None, "the decoder has no cross attention"),
    "pruned_heads": _fixed(None, "all layers have the same heads", {}),
    "per_layer_config": _fixed(None, "all layers have the same sizes", {}),
    "quantization_config": _fixed(None, UNQUANTIZED),
    "quantization": _fixed(None, UNQUANTIZED),  # of mlx-lm
    "compression_config": _fixed(None, UNQUANTIZED),
    "auto_map": _fixed(None, "the repository's own code would define the model"),
}  # fmt: skip

ROTARY = BASE | {
    **_ignored("dropout, which training here does not use", attention_dropout=0.0, hidden_dropout=0.0),
    **_ignored("noise of another training", neftune_noise_alpha=None),
    "hidden_size": _read(4096),
    "num_hidden_layers": _read(32),
    "num_attention_heads": _read(32),
    "num_key_value_heads": _read(32),
    "rms_norm_eps": _read(1e-6),
    "tie_word_embeddings": _read(False),
    "rope_parameters": _read(None, Mapping | NoneType),  # transformers 5
    "rope_theta": _read(10000.0, float | None),  # transformers 4, as rope_scaling
    "rope_scaling": _read(None, Mapping | NoneType),
    "rope_interleaved": _fixed(False, "the decoder rotates the halves of a head, as transformers does"),  # of nanotron
    "partial_rotary_factor": _fixed(None, "the decoder rotates whole heads", 1.0),
    "original_max_position_embeddings": _fixed(None, "set it in rope_parameters"),
}

LLAMA = ROTARY | {
    "vocab_size": _read(32000),
    "intermediate_size": _read(11008),
    "num_key_value_heads": _read(None, int | None),  # None: num_attention_heads
    "hidden_act": _fixed("silu", "the decoder's gate is silu"),
    "max_position_embeddings": _read(2048),
    "attention_bias": _read(False),
    "mlp_bias": _read(False),
    "head_dim": _read(None, int | None),  # None: hidden_size / num_attention_heads
    "sliding_window": _fixed(None, "all layers of a Llama see the whole text"),
    **_ignored("max_position_embeddings says it", max_sequence_length=2048),
    **_ignored("the tokenizer's", bos_token_id=1, eos_token_id=2),
    **_ignored("splits products, with the same result", pretraining_tp=1),
}

QWEN2 = ROTARY | {
    "vocab_size": _read(151936),
    "intermediate_size": _read(22016),
    "hidden_act": _fixed("silu", "the decoder's gate is silu"),
    "max_position_embeddings": _read(32768),
    "num_key_value_heads": _read(32, int | None),
    "head_dim": _read(None, int | None),  # not of the class; its model uses it where it is given
    "use_sliding_window": _read(False),
    "sliding_window": _read(4096, int | None),
    "max_window_layers": _read(28),
    "layer_types": _read(None, list | None),
    "use_mrope": _fixed(False, "the decoder's positions are one-dimensional"),
}

PHI3_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}  # fmt: skip
"""The code beside Microsoft's models, which transformers has since as its own."""
PHI4_TOKENS = "Xenova/gpt-4o"

SILU = {
    "hidden_act": _fixed("silu", "the decoder's gate is silu"),
    "head_dim": _read(None, int | None),  # None: hidden_size / num_attention_heads
    **_ignored("the tokenizer's", bos_token_id=1, eos_token_id=2),
}

MISTRAL = (
    ROTARY
    | SILU
    | {
        "vocab_size": _read(32000),
        "intermediate_size": _read(14336),
        "num_key_value_heads": _read(8),
        "max_position_embeddings": _read(131072),
        "sliding_window": _read(4096, int | None),  # of all layers
    }
)

MINISTRAL = MISTRAL | {"layer_types": _read(None, list | None)}

MINISTRAL3 = MISTRAL | {
    "vocab_size": _read(131072),
    "num_hidden_layers": _read(34),
    "head_dim": _read(128),
    "max_position_embeddings": _read(262144),
    "rms_norm_eps": _read(1e-5),
    "sliding_window": _read(None, int | None),  # of all layers
    **{name: _fixed(None, "set it in rope_parameters") for name in ("rope_theta", "rope_scaling")},
    **_ignored("the tokenizer's", pad_token_id=11),
}

SMOLLM3 = (
    ROTARY
    | SILU
    | {
        "vocab_size": _read(128256),
        "hidden_size": _read(2048),
        "intermediate_size": _read(11008),
        "num_hidden_layers": _read(36),
        "num_attention_heads": _read(16),
        "num_key_value_heads": _read(4, int | None),
        "max_position_embeddings": _read(32768),
        "rope_theta": _read(2_000_000.0, float | None),
        "use_sliding_window": _read(False),
        "sliding_window": _read(None, int | None),
        "no_rope_layers": _read(None, list | None),
        "no_rope_layer_interval": _read(4),
        "layer_types": _read(None, list | None),
        "attention_bias": _read(False),
        "mlp_bias": _read(False),
        "tie_word_embeddings": _read(True),
        **_ignored("the tokenizer's", pad_token_id=128004, bos_token_id=128000, eos_token_id=128001),
        **_ignored("max_position_embeddings says it, and the model does not read it", max_window_layers=28),
        **_ignored("split products of the program that trained it", pretraining_tp=1),
    }
)

OLMO2 = (
    ROTARY
    | SILU
    | {
        "vocab_size": _read(50304),
        "intermediate_size": _read(11008),
        "num_key_value_heads": _read(None, int | None),
        "max_position_embeddings": _read(2048),
        "rms_norm_eps": _read(1e-5),
        "attention_bias": _read(False),
        **_ignored("the tokenizer's", pad_token_id=1, bos_token_id=None, eos_token_id=50279),
    }
)

OLMO3 = OLMO2 | {"sliding_window": _read(4096, int | None), "layer_types": _read(None, list | None)}

GRANITE = (
    ROTARY
    | SILU
    | {
        "vocab_size": _read(32000),
        "intermediate_size": _read(11008),
        "num_key_value_heads": _read(None, int | None),
        "max_position_embeddings": _read(2048),
        "attention_bias": _read(False),
        "mlp_bias": _read(False),
        "embedding_multiplier": _read(1.0),
        "attention_multiplier": _read(1.0),
        "residual_multiplier": _read(1.0),
        "logits_scaling": _read(1.0),
    }
)

PHI3 = (
    ROTARY
    | SILU
    | {
        "vocab_size": _read(32064),
        "hidden_size": _read(3072),
        "intermediate_size": _read(8192),
        "num_key_value_heads": _read(None, int | None),
        "max_position_embeddings": _read(4096),
        "original_max_position_embeddings": _read(4096),
        "partial_rotary_factor": _read(1.0),
        "rms_norm_eps": _read(1e-5),
        "sliding_window": _read(None, int | None),  # of all layers
        "attention_bias": _fixed(False, "transformers ignores it in this family"),
        **{name: _fixed(False, "the decoder has none") for name in ("lm_head_bias", "mlp_bias")},
        **{name: _fixed(1, "the decoder has none") for name in ("full_attn_mod", "interpolate_factor")},
        "auto_map": _fixed(
            None,
            "the repository's own code would define the model",
            PHI3_CODE,
            PHI3_CODE | {"AutoTokenizer": PHI4_TOKENS},
        ),
        **_ignored("dropout, which training here does not use", resid_pdrop=0.0, embd_pdrop=0.0),
        **_ignored("the tokenizer's", bos_token_id=1, eos_token_id=32000, pad_token_id=32000),
    }
)

QWEN3 = QWEN2 | {"head_dim": _read(128), "attention_bias": _read(False)}

ALL_EXPERTS = "layers without experts are not supported"
QWEN3_MOE = {name: field for name, field in QWEN3.items() if name != "layer_types"} | {
    "use_sliding_window": _fixed(False, "transformers 4 and 5 give other layers a window"),
    **_ignored("of windows, which no layer has", sliding_window=4096, max_window_layers=28),
    **{name: _read(size) for name, size in (("hidden_size", 2048), ("num_hidden_layers", 24))},
    "head_dim": _read(None, int | None),  # not of the class; its model uses it where it is given
    **{name: _read(size) for name, size in (("moe_intermediate_size", 768), ("num_experts_per_tok", 8))},
    **{name: _read(128) for name in ("num_experts", "num_local_experts")},
    "num_key_value_heads": _read(4),
    "norm_topk_prob": _read(False),
    "decoder_sparse_step": _fixed(1, ALL_EXPERTS),
    "mlp_only_layers": _fixed(None, ALL_EXPERTS, []),
    **_ignored("the width of layers without experts", intermediate_size=6144),
    "shared_expert_intermediate_size": _fixed(0, "the decoder has no expert of all tokens"),  # of Qwen3-Coder, as
    "use_qk_norm": _fixed(True, "transformers normalizes queries and keys"),  # these two
    "qkv_bias": _fixed(False, "transformers reads attention_bias"),
    **_ignored("of training; set model.router_aux_loss_coef", router_aux_loss_coef=0.001, output_router_logits=False),
}

GEMMA2 = ROTARY | {
    "vocab_size": _read(256000),
    "hidden_size": _read(2304),
    "intermediate_size": _read(9216),
    "num_hidden_layers": _read(26),
    "num_attention_heads": _read(8),
    "num_key_value_heads": _read(4),
    "head_dim": _read(256),
    "hidden_activation": _fixed("gelu_pytorch_tanh", "the decoder's gate is gelu_pytorch_tanh"),
    **_ignored("the model uses hidden_activation", hidden_act=None),
    "max_position_embeddings": _read(8192),
    "tie_word_embeddings": _read(True),
    "attention_bias": _read(False),
    "query_pre_attn_scalar": _read(256),
    "sliding_window": _read(4096, int | None),
    "layer_types": _read(None, list | None),
    "final_logit_softcapping": _read(30.0, float | None),
    "attn_logit_softcapping": _read(50.0, float | None),
    "use_bidirectional_attention": _fixed(None, "the decoder is causal", False),
    **_ignored("the tokenizer's", pad_token_id=0, eos_token_id=1, bos_token_id=2),
    **_ignored("layer_types says it, and the model does not read it", _sliding_window_pattern=6),
    **_ignored("sliding_window says it, and the model does not read it", sliding_window_size=4096),  # of gemma-2-9b-it
}

GEMMA3 = GEMMA2 | {
    "vocab_size": _read(262208),
    "max_position_embeddings": _read(131072),
    "final_logit_softcapping": _read(None, float | None),
    "attn_logit_softcapping": _fixed(None, "transformers stores this cap and does not apply it"),
    "use_bidirectional_attention": _fixed(False, "the decoder is causal", None),
    "rope_theta": _read(1_000_000.0, float | None),
    "rope_local_base_freq": _read(10_000.0, float | None),
    "sliding_window_pattern": _read(6),
}

OF_GEMMA2 = {
    *("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar", "sliding_window", "layer_types"),
    *("_sliding_window_pattern", "sliding_window_size"),
}
GEMMA = {name: field for name, field in GEMMA2.items() if name not in OF_GEMMA2} | {
    "hidden_size": _read(3072),
    "intermediate_size": _read(24576),
    "num_hidden_layers": _read(28),
    "num_attention_heads": _read(16),
    "num_key_value_heads": _read(16),
    # "gelu" is what the first releases say and do not mean; transformers takes it for the other
    "hidden_act": _fixed("gelu_pytorch_tanh", "the decoder's gate is gelu_pytorch_tanh", "gelu"),
    "hidden_activation": _fixed(None, "the decoder's gate is gelu_pytorch_tanh", "gelu_pytorch_tanh"),
}

GPT2 = BASE | {
    "vocab_size": _read(50257),
    "n_positions": _read(1024),
    "n_embd": _read(768),
    "n_layer": _read(12),
    "n_head": _read(12),
    "n_inner": _read(None, int | None),  # None: 4 n_embd
    "layer_norm_epsilon": _read(1e-5),
    "activation_function": _fixed("gelu_new", "the decoder's activation is gelu_new"),
    "scale_attn_weights": _fixed(True, "the decoder scales attention"),
    "scale_attn_by_inverse_layer_idx": _fixed(False, "the decoder scales all layers alike"),
    "tie_word_embeddings": _fixed(True, "GPT-2's output layer is its embedding"),
    **_ignored("the tokenizer's", bos_token_id=50256, eos_token_id=50256),
    **_ignored("n_positions says it", n_ctx=1024),
    **_ignored("vocab_size says it", vocab_size_or_config_json_file=50257, n_special=0, predict_special_tokens=True),
    **_ignored("attention's softmax is in float32 anyway", reorder_and_upcast_attn=False),
    **_ignored("dropout, which training here does not use", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    **_ignored(
        "a head that is not loaded",
        summary_type="cls_index", summary_use_proj=True, summary_activation=None, summary_proj_to_labels=True,
        summary_first_dropout=0.1, summary_last_dropout=0.1, hidden_dropout=0.0,
    ),
}  # fmt: skip

GEMMA3_WITH_IMAGES = BASE | {
    "text_config": _read(None, Mapping | NoneType),
    "tie_word_embeddings": _read(True, bool | None),
    **_ignored("images are not read", vision_config=None, mm_tokens_per_image=256, boi_token_index=255_999),
    **_ignored("images are not read", eoi_token_index=256_000, image_token_index=262_144),
    **_ignored("images are not read", boi_token_id=255_999, eoi_token_id=256_000, image_token_id=262_144),
}
"""Gemma 3 with a vision tower, `Gemma3Config`: the decoder is its `text_config`."""

MINISTRAL3_WITH_IMAGES = BASE | {
    "text_config": _read(None, Mapping | NoneType),
    "tie_word_embeddings": _read(True),
    **_ignored("images are not read", vision_config=None, image_token_index=10, image_token_id=10),
    **_ignored("images are not read", projector_hidden_act="gelu", multimodal_projector_bias=False),
    **_ignored("images are not read", vision_feature_layer=-1, spatial_merge_size=2),
}
"""Ministral 3 with a vision tower, `Mistral3Config`."""

FIELDS = {
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3": GEMMA3_WITH_IMAGES,
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "gpt2": GPT2,
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL3,
    "mistral3": MINISTRAL3_WITH_IMAGES,
    "gemma": GEMMA,
    "smollm3": SMOLLM3,
    "olmo2": OLMO2,
    "granite": GRANITE,
    "phi3": PHI3,
    "olmo3": OLMO3,
}
"""The table of each `model_type`."""

"""Every field of the config.json of each supported family, its default, and what we do with it.

A field is read, or cannot change what the decoder computes, or must have the value that the decoder has. Other fields
are refused by name. Fields, defaults and types are those of transformers' config classes, versions 4.57 and 5.23, and
every field that a version since 2.0 wrote is known; `tests/conf/test_hugging_face_fields.py` compares them.
"""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from conf.hugging_face_base import BASE, ROTARY, UNQUANTIZED, fixed, ignored, read
from conf.hugging_face_gemma4 import GEMMA4, GEMMA4_UNIFIED, GEMMA4_WITH_IMAGES
from conf.hugging_face_rotation import GPT_OSS_ROTATION

LLAMA = ROTARY | {
    "vocab_size": read(32000),
    "intermediate_size": read(11008),
    "num_key_value_heads": read(None, int | None),  # None: num_attention_heads
    "hidden_act": fixed("silu", "the decoder's gate is silu"),
    "max_position_embeddings": read(2048),
    "attention_bias": read(False),
    "mlp_bias": read(False),
    "head_dim": read(None, int | None),  # None: hidden_size / num_attention_heads
    "sliding_window": fixed(None, "all layers of a Llama see the whole text"),
    **ignored("max_position_embeddings says it", max_sequence_length=2048),
    **ignored("the tokenizer's", bos_token_id=1, eos_token_id=2),
    **ignored("splits products, with the same result", pretraining_tp=1),
}

QWEN2 = ROTARY | {
    "vocab_size": read(151936),
    "intermediate_size": read(22016),
    "hidden_act": fixed("silu", "the decoder's gate is silu"),
    "max_position_embeddings": read(32768),
    "num_key_value_heads": read(32, int | None),
    "head_dim": read(None, int | None),  # not of the class; its model uses it where it is given
    "use_sliding_window": read(False),
    "sliding_window": read(4096, int | None),
    "max_window_layers": read(28),
    "layer_types": read(None, list | None),
    "use_mrope": fixed(False, "the decoder's positions are one-dimensional"),
}

PHI3_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}  # fmt: skip
"""The code beside Microsoft's models, which transformers has since as its own."""
PHI4_TOKENS = "Xenova/gpt-4o"

SILU = {
    "hidden_act": fixed("silu", "the decoder's gate is silu"),
    "head_dim": read(None, int | None),  # None: hidden_size / num_attention_heads
    **ignored("the tokenizer's", bos_token_id=1, eos_token_id=2),
}

MISTRAL = (
    ROTARY
    | SILU
    | {
        "vocab_size": read(32000),
        "intermediate_size": read(14336),
        "num_key_value_heads": read(8),
        "max_position_embeddings": read(131072),
        "sliding_window": read(4096, int | None),  # of all layers
    }
)

MINISTRAL = MISTRAL | {"layer_types": read(None, list | None)}

MINISTRAL3 = MISTRAL | {
    "vocab_size": read(131072),
    "num_hidden_layers": read(34),
    "head_dim": read(128),
    "max_position_embeddings": read(262144),
    "rms_norm_eps": read(1e-5),
    "sliding_window": read(None, int | None),  # of all layers
    **{name: fixed(None, "set it in rope_parameters") for name in ("rope_theta", "rope_scaling")},
    **ignored("the tokenizer's", pad_token_id=11),
}

SMOLLM3 = (
    ROTARY
    | SILU
    | {
        "vocab_size": read(128256),
        "hidden_size": read(2048),
        "intermediate_size": read(11008),
        "num_hidden_layers": read(36),
        "num_attention_heads": read(16),
        "num_key_value_heads": read(4, int | None),
        "max_position_embeddings": read(32768),
        "rope_theta": read(2_000_000.0, float | None),
        "use_sliding_window": read(False),
        "sliding_window": read(None, int | None),
        "no_rope_layers": read(None, list | None),
        "no_rope_layer_interval": read(4),
        "layer_types": read(None, list | None),
        "attention_bias": read(False),
        "mlp_bias": read(False),
        "tie_word_embeddings": read(True),
        **ignored("the tokenizer's", pad_token_id=128004, bos_token_id=128000, eos_token_id=128001),
        **ignored("max_position_embeddings says it, and the model does not read it", max_window_layers=28),
        **ignored("split products of the program that trained it", pretraining_tp=1),
    }
)

OLMO2 = (
    ROTARY
    | SILU
    | {
        "vocab_size": read(50304),
        "intermediate_size": read(11008),
        "num_key_value_heads": read(None, int | None),
        "max_position_embeddings": read(2048),
        "rms_norm_eps": read(1e-5),
        "attention_bias": read(False),
        **ignored("the tokenizer's", pad_token_id=1, bos_token_id=None, eos_token_id=50279),
    }
)

OLMO3 = OLMO2 | {"sliding_window": read(4096, int | None), "layer_types": read(None, list | None)}

GRANITE = (
    ROTARY
    | SILU
    | {
        "vocab_size": read(32000),
        "intermediate_size": read(11008),
        "num_key_value_heads": read(None, int | None),
        "max_position_embeddings": read(2048),
        "attention_bias": read(False),
        "mlp_bias": read(False),
        "embedding_multiplier": read(1.0),
        "attention_multiplier": read(1.0),
        "residual_multiplier": read(1.0),
        "logits_scaling": read(1.0),
    }
)

PHI3 = (
    ROTARY
    | SILU
    | {
        "vocab_size": read(32064),
        "hidden_size": read(3072),
        "intermediate_size": read(8192),
        "num_key_value_heads": read(None, int | None),
        "max_position_embeddings": read(4096),
        "original_max_position_embeddings": read(4096),
        "partial_rotary_factor": read(1.0),
        "rms_norm_eps": read(1e-5),
        "sliding_window": read(None, int | None),  # of all layers
        "attention_bias": fixed(False, "transformers ignores it in this family"),
        **{name: fixed(False, "the decoder has none") for name in ("lm_head_bias", "mlp_bias")},
        **{name: fixed(1, "the decoder has none") for name in ("full_attn_mod", "interpolate_factor")},
        "auto_map": fixed(
            None,
            "the repository's own code would define the model",
            PHI3_CODE,
            PHI3_CODE | {"AutoTokenizer": PHI4_TOKENS},
        ),
        **ignored("dropout, which training here does not use", resid_pdrop=0.0, embd_pdrop=0.0),
        **ignored("the tokenizer's", bos_token_id=1, eos_token_id=32000, pad_token_id=32000),
    }
)

QWEN3 = QWEN2 | {"head_dim": read(128), "attention_bias": read(False)}

ALL_EXPERTS = "layers without experts are not supported"
QWEN3_MOE = {name: field for name, field in QWEN3.items() if name != "layer_types"} | {
    "use_sliding_window": fixed(False, "transformers 4 and 5 give other layers a window"),
    **ignored("of windows, which no layer has", sliding_window=4096, max_window_layers=28),
    **{name: read(size) for name, size in (("hidden_size", 2048), ("num_hidden_layers", 24))},
    "head_dim": read(None, int | None),  # not of the class; its model uses it where it is given
    **{name: read(size) for name, size in (("moe_intermediate_size", 768), ("num_experts_per_tok", 8))},
    **{name: read(128) for name in ("num_experts", "num_local_experts")},
    "num_key_value_heads": read(4),
    "norm_topk_prob": read(False),
    "decoder_sparse_step": fixed(1, ALL_EXPERTS),
    "mlp_only_layers": fixed(None, ALL_EXPERTS, []),
    **ignored("the width of layers without experts", intermediate_size=6144),
    "shared_expert_intermediate_size": fixed(0, "the decoder has no expert of all tokens"),  # of Qwen3-Coder, as
    "use_qk_norm": fixed(True, "transformers normalizes queries and keys"),  # these two
    "qkv_bias": fixed(False, "transformers reads attention_bias"),
    **ignored("of training; set model.router_aux_loss_coef", router_aux_loss_coef=0.001, output_router_logits=False),
}

OTHER_TYPES = {f"qwen3_5{part}": {"linear_attention": "D", "full_attention": "G"} for part in ("_text", "_moe_text")}
"""Letters of layer_types of a family whose other layers have no window."""
DELTA_NET = {
    name: f"linear_{name}"
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
}
"""The keys of `Model.delta_net` and their fields."""
QWEN3_5 = ROTARY | {
    "vocab_size": read(248_320),
    "intermediate_size": read(12_288),
    "num_attention_heads": read(16),
    "num_key_value_heads": read(4),
    "head_dim": read(256),
    "hidden_act": fixed("silu", "the decoder's gate is silu"),
    "max_position_embeddings": read(32_768),
    "attention_bias": fixed(False, "queries and their gates have no biases"),
    "partial_rotary_factor": read(0.25),
    "layer_types": read(None, list | None),
    "full_attention_interval": read(4),
    "linear_conv_kernel_dim": read(4),
    "linear_key_head_dim": read(128),
    "linear_value_head_dim": read(128),
    "linear_num_key_heads": read(16),
    "linear_num_value_heads": read(32),
    # the rest are not of the class
    "attn_output_gate": fixed(True, "transformers has a gate in any case"),
    "output_gate_type": fixed("swish", "transformers computes no other"),
    "mlp_only_layers": fixed(None, "the layers have no experts", []),
    **ignored("heads of later tokens are not read", mtp_num_hidden_layers=0, mtp_use_dedicated_embeddings=False),
    **ignored("the layers' memory is float32 in any case", mamba_ssm_dtype="float32"),
}

QWEN3_5_MOE = QWEN3_5 | {
    **{name: read(size) for name, size in (("hidden_size", 2048), ("num_hidden_layers", 40), ("num_experts", 256))},
    **{name: read(size) for name, size in (("num_key_value_heads", 2), ("num_experts_per_tok", 8))},
    **{name: read(512) for name in ("moe_intermediate_size", "shared_expert_intermediate_size")},
    **ignored("of training; set model.router_aux_loss_coef", router_aux_loss_coef=0.001, output_router_logits=False),
    # the rest are not of the class
    **ignored("the width of layers without experts", intermediate_size=None),
    "norm_topk_prob": fixed(True, "transformers divides the shares in any case"),
    "decoder_sparse_step": fixed(1, ALL_EXPERTS),
    "mlp_only_layers": fixed(None, ALL_EXPERTS, []),
}

MXFP4: dict[str, Any] = {"quant_method": "mxfp4"}
KEPT_WIDE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
"""What OpenAI's files have as it is."""

GPT_OSS = ROTARY | {
    "vocab_size": read(201_088),
    "hidden_size": read(2880),
    "intermediate_size": read(2880),  # of an expert
    "num_hidden_layers": read(36),
    "num_attention_heads": read(64),
    "num_key_value_heads": read(8),
    "head_dim": read(64),
    "hidden_act": fixed("silu", "the decoder's gate is a sigmoid's product"),
    "max_position_embeddings": read(131_072),
    "rms_norm_eps": read(1e-5),
    "rope_theta": read(150_000.0, float | None),
    "rope_scaling": read(GPT_OSS_ROTATION, Mapping | NoneType),
    "attention_bias": read(True),
    "sliding_window": read(128, int | None),
    "layer_types": read(None, list | None),
    "num_local_experts": read(128),
    "num_experts_per_tok": read(4),
    "swiglu_alpha": fixed(1.702, "the decoder has this one"),
    "swiglu_limit": fixed(7.0, "the decoder has this one"),
    "quantization_config": fixed(
        None,
        f"only mxfp4 of experts is read; {UNQUANTIZED}",
        *(MXFP4, MXFP4 | {"modules_to_not_convert": None}, MXFP4 | {"modules_to_not_convert": KEPT_WIDE}),
    ),
    **ignored("num_experts_per_tok says it", experts_per_token=4),
    **ignored("rope_scaling says it", initial_context_length=4096),
    **ignored("of training; set model.router_aux_loss_coef", router_aux_loss_coef=0.001, output_router_logits=False),
}

GEMMA2 = ROTARY | {
    "vocab_size": read(256000),
    "hidden_size": read(2304),
    "intermediate_size": read(9216),
    "num_hidden_layers": read(26),
    "num_attention_heads": read(8),
    "num_key_value_heads": read(4),
    "head_dim": read(256),
    "hidden_activation": fixed("gelu_pytorch_tanh", "the decoder's gate is gelu_pytorch_tanh"),
    **ignored("the model uses hidden_activation", hidden_act=None),
    "max_position_embeddings": read(8192),
    "tie_word_embeddings": read(True),
    "attention_bias": read(False),
    "query_pre_attn_scalar": read(256),
    "sliding_window": read(4096, int | None),
    "layer_types": read(None, list | None),
    "final_logit_softcapping": read(30.0, float | None),
    "attn_logit_softcapping": read(50.0, float | None),
    "use_bidirectional_attention": fixed(None, "the decoder is causal", False),
    **ignored("the tokenizer's", pad_token_id=0, eos_token_id=1, bos_token_id=2),
    **ignored("layer_types says it, and the model does not read it", _sliding_window_pattern=6),
    **ignored("sliding_window says it, and the model does not read it", sliding_window_size=4096),  # of gemma-2-9b-it
}

GEMMA3 = GEMMA2 | {
    "vocab_size": read(262208),
    "max_position_embeddings": read(131072),
    "final_logit_softcapping": read(None, float | None),
    "attn_logit_softcapping": fixed(None, "transformers stores this cap and does not apply it"),
    "use_bidirectional_attention": fixed(False, "the decoder is causal", None),
    "rope_theta": read(1_000_000.0, float | None),
    "rope_local_base_freq": read(10_000.0, float | None),
    "sliding_window_pattern": read(6),
}

OF_GEMMA2 = {
    *("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar", "sliding_window", "layer_types"),
    *("_sliding_window_pattern", "sliding_window_size"),
}
GEMMA = {name: field for name, field in GEMMA2.items() if name not in OF_GEMMA2} | {
    "hidden_size": read(3072),
    "intermediate_size": read(24576),
    "num_hidden_layers": read(28),
    "num_attention_heads": read(16),
    "num_key_value_heads": read(16),
    # "gelu" is what the first releases say and do not mean; transformers takes it for the other
    "hidden_act": fixed("gelu_pytorch_tanh", "the decoder's gate is gelu_pytorch_tanh", "gelu"),
    "hidden_activation": fixed(None, "the decoder's gate is gelu_pytorch_tanh", "gelu_pytorch_tanh"),
}

GPT2 = BASE | {
    "vocab_size": read(50257),
    "n_positions": read(1024),
    "n_embd": read(768),
    "n_layer": read(12),
    "n_head": read(12),
    "n_inner": read(None, int | None),  # None: 4 n_embd
    "layer_norm_epsilon": read(1e-5),
    "activation_function": fixed("gelu_new", "the decoder's activation is gelu_new"),
    "scale_attn_weights": fixed(True, "the decoder scales attention"),
    "scale_attn_by_inverse_layer_idx": fixed(False, "the decoder scales all layers alike"),
    "tie_word_embeddings": fixed(True, "GPT-2's output layer is its embedding"),
    **ignored("the tokenizer's", bos_token_id=50256, eos_token_id=50256),
    **ignored("n_positions says it", n_ctx=1024),
    **ignored("vocab_size says it", vocab_size_or_config_json_file=50257, n_special=0, predict_special_tokens=True),
    **ignored("attention's softmax is in float32 anyway", reorder_and_upcast_attn=False),
    **ignored("dropout, which training here does not use", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    **ignored(
        "a head that is not loaded",
        summary_type="cls_index", summary_use_proj=True, summary_activation=None, summary_proj_to_labels=True,
        summary_first_dropout=0.1, summary_last_dropout=0.1, hidden_dropout=0.0,
    ),
}  # fmt: skip

GEMMA3_WITH_IMAGES = BASE | {
    "text_config": read(None, Mapping | NoneType),
    "tie_word_embeddings": read(True, bool | None),
    **ignored("images are not read", vision_config=None, mm_tokens_per_image=256, boi_token_index=255_999),
    **ignored("images are not read", eoi_token_index=256_000, image_token_index=262_144),
    **ignored("images are not read", boi_token_id=255_999, eoi_token_id=256_000, image_token_id=262_144),
}
"""Gemma 3 with a vision tower, `Gemma3Config`: the decoder is its `text_config`."""

MINISTRAL3_WITH_IMAGES = BASE | {
    "text_config": read(None, Mapping | NoneType),
    "tie_word_embeddings": read(True),
    **ignored("images are not read", vision_config=None, image_token_index=10, image_token_id=10),
    **ignored("images are not read", projector_hidden_act="gelu", multimodal_projector_bias=False),
    **ignored("images are not read", vision_feature_layer=-1, spatial_merge_size=2),
}
"""Ministral 3 with a vision tower, `Mistral3Config`."""

QWEN3_5_WITH_IMAGES = BASE | {
    "text_config": read(None, Mapping | NoneType),
    "tie_word_embeddings": read(False),
    **ignored("images are not read", vision_config=None, image_token_id=248_056, video_token_id=248_057),
    **ignored("images are not read", vision_start_token_id=248_053, vision_end_token_id=248_054),
    **ignored("of programs that serve it", language_model_only=False),
}

FIELDS = {
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3": GEMMA3_WITH_IMAGES,
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
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
    "gemma4_text": GEMMA4,
    "gemma4": GEMMA4_WITH_IMAGES,
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "gemma4_unified": GEMMA4_WITH_IMAGES,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), QWEN3_5_WITH_IMAGES),
}
"""The table of each `model_type`."""


def delta_net(fields: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """Return the key of `Model` for the sizes of recurrent layers, None where a pattern has none."""
    return {"delta_net": {ours: fields[name] for ours, name in DELTA_NET.items()} if "D" in pattern else None}

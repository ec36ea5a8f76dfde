"""The fields of Gemma 4's config.json: the text model, alone or beside images and sound, and what sets its layers."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from conf.hugging_face_base import BASE, ROTARY, fixed, ignored, read, unsupported

GEMMA4_UNIFIED = ROTARY | {
    "vocab_size": read(262_144),
    "hidden_size": read(2304),
    "intermediate_size": read(9216),
    "num_hidden_layers": read(30),
    "num_attention_heads": read(8),
    "num_key_value_heads": read(4),
    "head_dim": read(256),
    "hidden_activation": fixed("gelu_pytorch_tanh", "the decoder's gate is gelu_pytorch_tanh"),
    "max_position_embeddings": read(262_144),
    "tie_word_embeddings": read(True),
    "attention_bias": read(False),
    "sliding_window": read(1024),
    "layer_types": read(None, list | None),
    "final_logit_softcapping": read(None, float | None),
    "use_bidirectional_attention": fixed("vision", "the decoder is causal; vision is of images only", None),
    "is_causal": fixed(True, "the decoder is causal"),
    "attention_k_eq_v": read(False),
    "num_kv_shared_layers": read(0),
    "use_double_wide_mlp": read(False),
    "global_head_dim": read(512),
    "num_global_key_value_heads": read(None, int | None),  # None: num_key_value_heads
    "per_layer_config": read(None, Mapping | NoneType),  # transformers 5.24 writes it instead of these two
    **{name: fixed(None, "set it in rope_parameters") for name in ("rope_theta", "rope_scaling")},
    **ignored("the tokenizer's", pad_token_id=0, eos_token_id=1, bos_token_id=2),
}
"""The text model of 12B, which has no embeddings per layer."""

EXPERTS = {"count": "num_experts", "per_token": "top_k_experts", "inner_dim": "moe_intermediate_size"}
"""Keys of `model.experts`, and the fields that set them."""

GEMMA4 = GEMMA4_UNIFIED | {
    "max_position_embeddings": read(131_072),
    "sliding_window": read(512),
    "use_bidirectional_attention": fixed(None, "the decoder is causal; vision is of images only", "vision"),
    "hidden_size_per_layer_input": read(256),
    "vocab_size_per_layer_input": read(262_144),
    "enable_moe_block": read(False),
    **{name: read(None, int | None) for name in EXPERTS.values()},
    **ignored("no version reads it", expert_intermediate_size=None),
}

GEMMA4_WITH_IMAGES = BASE | {
    "text_config": read(None, Mapping | NoneType),
    "tie_word_embeddings": read(True),
    **ignored("images are not read", vision_config=None, vision_soft_tokens_per_image=None, image_token_id=258_880),
    **ignored("images are not read", boi_token_id=255_999, eoi_token_id=258_882, video_token_id=258_884),
    **ignored("sound is not read", audio_config=None, boa_token_id=256_000, eoa_token_id=None),
    **ignored("sound is not read", eoa_token_index=258_883, audio_token_id=258_881),
}
"""`Gemma4Config` and `Gemma4UnifiedConfig`."""

GEMMA4_TEXT = ("gemma4_text", "gemma4_unified_text")


def gemma4_layers(fields: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """Return the keys of `Model` for what layers of Gemma 4 have of their own. Raises UnknownArchitectureError."""
    count, width = fields["num_hidden_layers"], fields.get("hidden_size_per_layer_input", 0)
    letters = (pattern * count)[:count]
    if letters[-1:] != "G":
        raise unsupported("layer_types", fields["layer_types"], "transformers makes the last layer full_attention")
    rows = fields.get("vocab_size_per_layer_input")
    if width and rows != fields["vocab_size"]:
        raise unsupported("vocab_size_per_layer_input", rows, "all tables have the rows of vocab_size")
    kept = ("num_kv_shared_layers", "use_double_wide_mlp", "attention_k_eq_v")
    found = {name: fields[name] for name in kept} | {"per_layer_dim": width} | _global_sizes(fields, letters)
    if not fields.get("enable_moe_block"):
        return found
    if missing := [name for name in EXPERTS.values() if fields[name] is None]:
        raise unsupported(missing[0], None, "enable_moe_block needs a number")
    return found | {"experts": {ours: fields[name] for ours, name in EXPERTS.items()} | {"norm_topk_prob": True}}


def _global_sizes(fields: Mapping[str, Any], letters: str) -> dict[str, Any]:
    """Return the head size and the number of key heads of global layers, None where local ones have the same."""
    given, as_keys = fields["per_layer_config"], fields["attention_k_eq_v"]
    if given is None:
        heads = fields["num_global_key_value_heads"] if as_keys else None
        found = {"global_head_dim": fields["global_head_dim"], "num_global_kv_heads": heads}
    else:
        own = {str(name).lstrip("0") or "0": sizes for name, sizes in given.items() if sizes}
        sizes = next(iter(own.values()), {})
        wanted = {str(i): sizes for i, letter in enumerate(letters) if letter == "G"} if own else {}
        known = {"head_dim", "num_key_value_heads"} if as_keys else {"head_dim"}
        if own != wanted or not isinstance(sizes, Mapping) or sizes.keys() - known:
            only = " and ".join(sorted(known))
            raise unsupported("per_layer_config", given, f"only {only}, the same of all full_attention layers")
        found = {"global_head_dim": sizes.get("head_dim"), "num_global_kv_heads": sizes.get("num_key_value_heads")}
    same = {"global_head_dim": fields["head_dim"], "num_global_kv_heads": fields["num_key_value_heads"]}
    return {name: None if size == same[name] else size for name, size in found.items()}

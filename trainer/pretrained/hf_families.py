"""The families of Hugging Face: which can express a model of ours, and the config.json that says it.

`conf/config_json.py` reads config.json; `hf_tensors` names the tensors.
"""

import re
from collections.abc import Mapping
from typing import Any

from conf.config_json import ARCHITECTURES, BY_LAYER_TYPE, FAMILIES, LAYER_TYPES, MULTIPLIERS, NAMES
from conf.config_json import UnknownArchitectureError as UnknownArchitectureError
from conf.config_json import model_from_config as model_from_config
from conf.config_json import without_unknown_fields as without_unknown_fields
from conf.hugging_face_fields import DELTA_NET, FIELDS, OTHER_TYPES
from conf.hugging_face_rotation import ANY_ROTATION, ROTATIONS
from conf.schema.training.model import Model, family_switches


def hf_config(cfg: Model) -> dict[str, Any]:
    """Return a config.json from which transformers builds the same model. Raises UnknownArchitectureError."""
    found = family_of(cfg)
    kind = next((kind for kind, family in FAMILIES.items() if family == found), None)
    if kind is None:
        raise UnknownArchitectureError(why_unpublished(cfg))
    common = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind][0]],
        "vocab_size": cfg.vocab_size,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "dtype": "float32",
    }
    if kind == "gpt2":
        return common | {
            "n_layer": cfg.num_layers, "n_embd": cfg.dim, "n_head": cfg.num_heads, "n_inner": cfg.mlp_dim,
            "n_positions": cfg.max_seq_len, "layer_norm_epsilon": cfg.norm_eps, "activation_function": "gelu_new",
        }  # fmt: skip
    if (FIELDS[kind]["pad_token_id"].default or 0) >= cfg.vocab_size:
        common["pad_token_id"] = None  # transformers makes it a row of the embedding
    return common | _rotary_config(cfg, kind)


COMMON_KEYS = {"norm_eps", "max_seq_len", "family", "experts"}
"""Model keys that every config.json contains, the family, which it is, and experts, which have a table of their own."""
ROTARY_KEYS = {"rope_theta", "rope_scaling", "tie_word_embeddings", "biases"}
WINDOW_KEYS = {"attention_pattern", "sliding_window"}
GEMMA_KEYS = ROTARY_KEYS | WINDOW_KEYS | {"query_pre_attn_scalar", "final_logit_softcap"}
KEYS_BY_FAMILY = {
    "gemma2": GEMMA_KEYS | {"attn_logit_softcap"},
    "gemma3": GEMMA_KEYS | {"rope_local_theta"},
    "llama3": ROTARY_KEYS,
    "qwen2": ROTARY_KEYS | WINDOW_KEYS,
    "qwen3": ROTARY_KEYS | WINDOW_KEYS,
    "qwen3_moe": ROTARY_KEYS,
    "gpt_oss": ROTARY_KEYS | WINDOW_KEYS,
    "gpt2": {"biases"},
    "mistral": ROTARY_KEYS | WINDOW_KEYS,
    "ministral": ROTARY_KEYS | WINDOW_KEYS,
    "ministral3": ROTARY_KEYS | WINDOW_KEYS,
    "gemma": ROTARY_KEYS,
    "smollm3": ROTARY_KEYS | WINDOW_KEYS,
    "olmo2": ROTARY_KEYS,
    "granite": ROTARY_KEYS | {"query_pre_attn_scalar", *MULTIPLIERS},
    "phi3": ROTARY_KEYS | WINDOW_KEYS | {"partial_rotary_factor"},
    "olmo3": ROTARY_KEYS | WINDOW_KEYS | {"rope_local_theta"},
    "gemma4": ROTARY_KEYS
    | WINDOW_KEYS
    | {"rope_local_theta", "final_logit_softcap", "global_head_dim", "num_global_kv_heads", "num_kv_shared_layers"}
    | {"use_double_wide_mlp", "per_layer_dim", "attention_k_eq_v"},
    "qwen3_5": ROTARY_KEYS | {"attention_pattern", "partial_rotary_factor", "delta_net"},
    "qwen3_5_moe": ROTARY_KEYS | {"attention_pattern", "partial_rotary_factor", "delta_net"},
}
"""Further model keys per family."""
BIASES_BY_FAMILY = {
    "gemma2": ("none", "attention"),
    "gemma3": ("none", "attention"),
    "llama3": ("none", "attention", "mlp", "all"),
    "qwen2": ("qkv",),
    **dict.fromkeys(("qwen3", "qwen3_moe"), ("none", "attention")),
    "gpt2": ("all",),
    "gpt_oss": ("mlp", "all"),
    "smollm3": ("none", "attention", "mlp", "all"),
    "granite": ("none", "attention", "mlp", "all"),
    **dict.fromkeys(("gemma", "olmo2", "olmo3", "gemma4"), ("none", "attention")),
    **dict.fromkeys(("mistral", "ministral", "ministral3", "phi3", "qwen3_5", "qwen3_5_moe"), ("none",)),
}
"""Values of `model.biases` per family."""
EXPERTS_BY_FAMILY = {
    "qwen3_moe": ("divided", "undivided"), "gpt_oss": ("divided",), "gemma4": ("none", "divided beside a block"),
    "qwen3_5_moe": ("divided beside a shared one",),
}  # fmt: skip
"""Experts that a family may have, as `_experts` says it; the others have none."""
PATTERNS = dict.fromkeys(("mistral", "ministral3", "phi3"), "L+|G+") | {"smollm3": "[LGlg]+"}
PATTERNS |= dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "[DG]+")
"""What `model.attention_pattern` is per family, where it is not L and G at will."""
COMPUTE_KEYS = {
    "init",
    "activation_dtype",
    "attention",
    "scan_layers",
    "remat",
    "logit_chunk",
    "weights",
    "config_json",
    "hyper",
    "maha",
    "lora",
    "router_aux_loss_coef",
}
"""Model keys without a counterpart in config.json: initial values, and how the model is computed."""


def family_of(cfg: Model) -> str | None:
    """Return the family whose config.json can express the model, its own if it can, or None."""
    for name, said in sorted(KEYS_BY_FAMILY.items(), key=lambda item: item[0] != cfg.family):
        free = COMMON_KEYS | said | COMPUTE_KEYS
        if not {*"Ll"} & {*cfg.attention_pattern}:
            free |= {"sliding_window"}  # of no layer
        if cfg.biases not in BIASES_BY_FAMILY[name]:
            continue
        if not re.fullmatch(PATTERNS.get(name, "[LG]+"), cfg.attention_pattern):
            continue
        if _experts(cfg) not in EXPERTS_BY_FAMILY.get(name, ("none",)):
            continue
        if "rope_local_theta" in said and cfg.rope_local_theta is None:
            continue  # transformers would use its default
        if (cfg.rope_scaling.kind if cfg.rope_scaling else "default") not in ROTATIONS.get(name, ANY_ROTATION):
            continue
        if name != "ministral3" and getattr(cfg.rope_scaling, "llama_4_scaling_beta", 0):
            continue
        if cfg.num_global_kv_heads is not None and not cfg.attention_k_eq_v:
            continue
        if all(getattr(cfg, key) == value for key, value in family_switches(name).items() if key not in free):
            return name
    return None


def _experts(cfg: Model) -> str:
    """Return whether the shares of experts are divided by their sum, and whether a dense block is beside them."""
    if cfg.experts is None:
        return "none"
    shares = "divided" if cfg.experts.norm_topk_prob else "undivided"
    beside = " beside a block" if cfg.has_dense_block else " beside a shared one" if cfg.shared_dim else ""
    return f"{shares}{beside}"


def why_unpublished(cfg: Model) -> str:
    """Return why no family can express the model."""
    for key, usual in (("residual", "plain"), ("attention_form", "causal")):
        if (value := getattr(cfg, key)) != usual:
            return f"model.{key}: no published layout of weights has {value}, only {usual}"
    return "model: transformers has no architecture with these settings"


def _rotary_config(cfg: Model, kind: str) -> dict[str, Any]:
    known, gemma = FIELDS[kind], kind.startswith("gemma")
    letters = (cfg.attention_pattern * cfg.num_layers)[: cfg.num_layers]
    written: dict[str, Any] = {
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": cfg.dim,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.mlp_dim,
        "max_position_embeddings": cfg.max_seq_len,
        "rms_norm_eps": cfg.norm_eps,
        "hidden_act" if "hidden_act" in known and known["hidden_act"].use == "fixed" else "hidden_activation": (
            "gelu_pytorch_tanh" if gemma else "silu"
        ),
        "rope_theta": cfg.rope_theta,
    }
    if (scaling := cfg.rope_scaling) is not None:
        written["rope_scaling"] = {"rope_type": scaling.kind} | scaling.model_dump(mode="json", exclude={"kind"})
        if kind == "ministral3":  # of transformers 5 only
            written["rope_parameters"] = written.pop("rope_scaling") | {"rope_theta": written.pop("rope_theta")}
        else:
            written["rope_scaling"].pop("llama_4_scaling_beta", None)  # 0
    if cfg.biases in ("attention", "all") or kind == "gpt_oss":
        written["attention_bias"] = cfg.biases != "mlp"
    if cfg.biases in ("mlp", "all") and "mlp_bias" in known:
        written["mlp_bias"] = True
    if cfg.experts is not None:
        names = NAMES[kind]
        written |= {names[key]: value for key, value in cfg.experts.model_dump().items() if key in names}
        written[names["mlp_dim"]] = cfg.mlp_dim
        written |= {"norm_topk_prob": cfg.experts.norm_topk_prob} if "norm_topk_prob" in known else {}
    written |= _window_fields(cfg, letters, known)
    written |= {name: getattr(cfg, name) for name in MULTIPLIERS if name in known}
    if "attention_multiplier" in known:  # in the digits that a double holds for certain
        written["attention_multiplier"] = float(f"{(cfg.query_pre_attn_scalar or cfg.head_dim) ** -0.5:.15g}")
    if "no_rope_layers" in known:
        written["no_rope_layers"] = [int(letter.isupper()) for letter in letters]
    if kind == "phi3":
        original = getattr(scaling, "original_max_position_embeddings", cfg.max_seq_len)
        written |= {
            "partial_rotary_factor": cfg.partial_rotary_factor, "original_max_position_embeddings": original
        }  # fmt: skip
    if "query_pre_attn_scalar" in known:
        scalar = cfg.query_pre_attn_scalar or cfg.head_dim
        written |= {
            "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,  # must be an integer
            "attn_logit_softcapping": cfg.attn_logit_softcap,
        }
    if "final_logit_softcapping" in known:
        written["final_logit_softcapping"] = cfg.final_logit_softcap
    if "rope_local_base_freq" in known and cfg.rope_local_theta is not None:
        written["rope_local_base_freq"] = cfg.rope_local_theta
    elif kind in BY_LAYER_TYPE:  # transformers 5; version 4 reads the fields above
        everywhere = written.get("rope_scaling", {"rope_type": "default"}) | {"rope_theta": cfg.rope_theta}
        local = {"rope_type": "default", "rope_theta": cfg.rope_local_theta}
        written["rope_parameters"] = {"full_attention": everywhere, "sliding_attention": local}
    if kind in OTHER_TYPES:
        return written | _qwen3_5_fields(cfg, written, letters)
    return written | _gemma4_fields(cfg, written) if kind == "gemma4_text" else written


def _qwen3_5_fields(cfg: Model, written: dict[str, Any], letters: str) -> dict[str, Any]:
    """Return what Qwen 3.5 says of its layers; removes from `written` what its class has in rope_parameters only."""
    names = {letter: name for name, letter in OTHER_TYPES["qwen3_5_text"].items()}
    rotation = written.pop("rope_scaling", {"rope_type": "default"}) | {"rope_theta": written.pop("rope_theta")}
    sizes = {} if cfg.delta_net is None else {DELTA_NET[name]: n for name, n in cfg.delta_net.model_dump().items()}
    if cfg.experts is not None:  # whose class lacks these two
        del written["intermediate_size"], written["norm_topk_prob"]
    return {
        "layer_types": [names[letter] for letter in letters],
        "rope_parameters": rotation | {"partial_rotary_factor": cfg.partial_rotary_factor},
        **sizes,
    }


def _gemma4_fields(cfg: Model, written: dict[str, Any]) -> dict[str, Any]:
    """Return what Gemma 4 says of its layers; removes from `written` what its class has in rope_parameters only."""
    for name in ("rope_theta", "rope_scaling"):
        written.pop(name, None)
    return {
        "global_head_dim": cfg.global_head_dim or cfg.head_dim,
        "num_global_key_value_heads": cfg.num_global_kv_heads,
        "attention_k_eq_v": cfg.attention_k_eq_v,
        "num_kv_shared_layers": cfg.num_kv_shared_layers,
        "use_double_wide_mlp": cfg.use_double_wide_mlp,
        "hidden_size_per_layer_input": cfg.per_layer_dim,
        "vocab_size_per_layer_input": cfg.vocab_size,
        "enable_moe_block": cfg.experts is not None,
    }


def _window_fields(cfg: Model, letters: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of local layers, of those that a config class has."""
    local, by_layer, switched = "L" in letters.upper(), "layer_types" in known, "use_sliding_window" in known
    if "sliding_window" not in known or known["sliding_window"].use != "read" or (switched and not local):
        return {}
    written: dict[str, Any] = {"sliding_window": cfg.sliding_window if local or by_layer else None}
    names = {letter: name for name, letter in LAYER_TYPES.items()}
    written |= {"layer_types": [names[letter.upper()] for letter in letters]} if by_layer else {}
    return written | ({"use_sliding_window": True} if switched else {})

"""Read Hugging Face's config.json into our model config: completely, defaults of its class included, or not at all."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from pydantic import ValidationError

from conf.hugging_face_base import UnknownArchitectureError as UnknownArchitectureError
from conf.hugging_face_base import require, unsupported
from conf.hugging_face_fields import DELTA_NET, FIELDS, OTHER_TYPES, delta_net
from conf.hugging_face_gemma4 import EXPERTS, GEMMA4_TEXT, gemma4_layers
from conf.hugging_face_rotation import (
    ANY_ROTATION,
    DEFAULT_ROTATIONS,
    ROPE_FIELDS,
    ROPE_TYPES,
    ROTATIONS,
    longrope,
    yarn,
)
from conf.schema.training.model import Model, family_switches

CLASSES = {
    "gemma2": "Gemma2", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe",
    "mistral": "Mistral", "ministral": "Ministral", "ministral3": "Ministral3", "gemma": "Gemma", "smollm3": "SmolLM3",
    "olmo2": "Olmo2", "granite": "Granite", "phi3": "Phi3", "olmo3": "Olmo3", "gpt_oss": "GptOss",
}  # fmt: skip
"""How the names of a family's classes begin, by model_type of config.json."""
CLASSES_WITH_IMAGES = {
    "gemma3": "Gemma3", "gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified", "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
}  # fmt: skip
"""The same of models with a vision tower, and of their decoders, whose model_type ends in _text."""
FAMILIES = {kind: kind for kind in CLASSES} | {
    "gemma3_text": "gemma3", "llama": "llama3", "gpt2": "gpt2", **dict.fromkeys(GEMMA4_TEXT, "gemma4"),
    "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe",
}  # fmt: skip
"""Maps model_type of config.json to our family."""
ARCHITECTURES = {
    **{kind: (f"{name}ForCausalLM", f"{name}Model") for kind, name in CLASSES.items()},
    **{f"{kind}_text": (f"{name}ForCausalLM", f"{name}TextModel") for kind, name in CLASSES_WITH_IMAGES.items()},
    **{kind: (f"{name}ForConditionalGeneration", f"{name}Model") for kind, name in CLASSES_WITH_IMAGES.items()},
    "mistral3": ("Mistral3ForConditionalGeneration", "Mistral3Model"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model", "GPT2DoubleHeadsModel"),
}
"""Classes whose weights are a decoder's."""
WITH_IMAGES = {kind: f"{kind}_text" for kind in CLASSES_WITH_IMAGES} | {"mistral3": "ministral3"}
"""Models with a vision tower, and what their `text_config` must be."""
PERIODS = {"gemma2": 2, "gpt_oss": 2, "olmo3": 4} | dict.fromkeys(GEMMA4_TEXT, 6)
"""Every how many layers one is global, where layer_types does not say it."""
BY_LAYER_TYPE = ("gemma3_text", "olmo3", *GEMMA4_TEXT)
"""Families whose rope_parameters have an entry per layer type."""
OLMO3_THETA = 500_000.0
"""What transformers 5 takes for local layers where only rope_theta is set."""
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
LAYER_TYPES = {"sliding_attention": "L", "full_attention": "G"}
THEIR_NAMES = {
    "num_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "mlp_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "attn_logit_softcap": "attn_logit_softcapping",
    "final_logit_softcap": "final_logit_softcapping",
} | DELTA_NET
GPT2_NAMES = {
    "num_layers": "n_layer", "dim": "n_embd", "num_heads": "n_head", "num_kv_heads": "n_head", "mlp_dim": "n_inner",
    "max_seq_len": "n_positions", "norm_eps": "layer_norm_epsilon",
}  # fmt: skip

OF_QWEN = THEIR_NAMES | {"mlp_dim": "moe_intermediate_size", "count": "num_experts", "per_token": "num_experts_per_tok"}
NAMES = {
    "gpt2": GPT2_NAMES,
    "qwen3_moe": OF_QWEN,
    "qwen3_5_moe_text": OF_QWEN | {"shared_dim": "shared_expert_intermediate_size"},
    "gpt_oss": THEIR_NAMES | {"count": "num_local_experts", "per_token": "num_experts_per_tok"},
    "gemma4_text": THEIR_NAMES | EXPERTS,
}


def without_unknown_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the fields that its family's table lacks."""
    kind = _kind(config)
    known = {name: value for name, value in config.items() if name in FIELDS[kind]}
    if isinstance(text := known.get("text_config"), Mapping):
        known["text_config"] = {name: value for name, value in text.items() if name in FIELDS[WITH_IMAGES[kind]]}
    return known


def model_from_config(config: Any, **compute: Any) -> Model:
    """Return our model config for a config.json, as transformers 4 or 5 writes it.

    compute: keys of `Model` that set how it is computed; the others come from config.json and the family.

    Raises:
        UnknownArchitectureError: config.json contains something that `Model` cannot express, or that is unknown.
    """
    if not isinstance(config, Mapping):
        raise UnknownArchitectureError("config.json: it is no mapping")
    kind = _kind(config)
    fields, given = _fields(config, kind), config
    if kind in WITH_IMAGES:
        kind, fields, given = _text_fields(fields, config)
    try:
        described = _gpt2_model(fields) if kind == "gpt2" else _rotary_model(fields, given, kind)
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, UnknownArchitectureError):
            raise
        raise UnknownArchitectureError(f"config.json: a field of {kind} has a value of another type: {error}") from None
    try:
        return Model.model_validate({**family_switches(FAMILIES[kind]), **described, **compute})
    except ValidationError as error:
        found = error.errors()[0]
        names = NAMES.get(kind, THEIR_NAMES)
        parts = [str(part) for part in found["loc"] if part not in ("experts", "delta_net")]
        key = ".".join(names.get(part, part) for part in parts) or "model"
        raise UnknownArchitectureError(f"config.json: {key} of {kind}: {found['msg']}") from None


def _text_fields(outer: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, dict[str, Any], Mapping[str, Any]]:
    """Return kind and fields of the decoder beside a vision tower, and what config.json says of it."""
    kind = WITH_IMAGES[config["model_type"]]
    given = outer["text_config"] or {}
    if kind == "ministral3":  # transformers takes what names no other for a Mistral
        given = {"model_type": "mistral"} | given
    fields = _fields(given, kind, config["model_type"])
    tied = outer["tie_word_embeddings"]
    # a head of its own is read although the wrapper's default would tie it
    is_said = kind != "ministral3" or "tie_word_embeddings" in config
    if is_said and fields["tie_word_embeddings"] != tied:
        raise unsupported("tie_word_embeddings", tied, "text_config has another value")
    if kind == "gemma3_text" and (cap := fields["final_logit_softcapping"]) is not None:
        raise unsupported("text_config.final_logit_softcapping", cap, "transformers does not apply it with images")
    return kind, fields, given


def _kind(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise UnknownArchitectureError(f"config.json: model_type {kind!r} is not one of {', '.join(FIELDS)}")
    return kind


def _fields(config: Mapping[str, Any], kind: str, outer: str = "") -> dict[str, Any]:
    """Return every field of a config class: what config.json says, else the class's default.

    outer: the kind whose text_config it is.
    """
    prefix = "text_config." if outer else ""
    table = FIELDS[kind]
    if unknown := [f"{prefix}{name}" for name in config if name not in table]:
        raise UnknownArchitectureError(
            f"config.json: {', '.join(unknown)}: unknown to {kind}; remove what does not change what the model "
            "computes; for a file that is not yours, set model.config_json to a copy without it"
        )
    for name, value in config.items():
        field = table[name]
        if field.use == "fixed" and not any(_is_same(value, known) for known in (field.default, *field.allowed)):
            raise unsupported(prefix + name, value, field.note)
        require(prefix + name, value, field.type_)
    found = {name: config.get(name, field.default) for name, field in table.items()}
    if found["model_type"] not in ("", kind):
        raise unsupported(f"{prefix}model_type", found["model_type"], f"{kind} was expected")
    for name in found["architectures"] or ():
        accepted = ARCHITECTURES[kind] + (ARCHITECTURES[outer] if outer else ())
        if name not in accepted:
            raise unsupported(f"{prefix}architectures", name, f"only {', '.join(ARCHITECTURES[kind])}")
    return found


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are equal; unlike in Python, true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _gpt2_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    dim, heads = fields["n_embd"], fields["n_head"]
    return {
        "num_layers": fields["n_layer"], "dim": dim, "num_heads": heads, "num_kv_heads": heads,
        "head_dim": _quotient(dim, heads, "n_embd", "n_head"), "mlp_dim": fields["n_inner"] or 4 * dim,
        "vocab_size": fields["vocab_size"], "max_seq_len": fields["n_positions"],
        "norm_eps": fields["layer_norm_epsilon"],
    }  # fmt: skip


def _quotient(whole: int, parts: int, name: str, parts_name: str) -> int:
    if parts < 1 or whole % parts:
        raise UnknownArchitectureError(f"config.json: {name} ({whole}) is no multiple of {parts_name} ({parts})")
    return whole // parts


def _rotary_model(fields: Mapping[str, Any], given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    heads = fields["num_attention_heads"]
    head_dim = fields["head_dim"]
    if head_dim is None:
        head_dim = _quotient(fields["hidden_size"], heads, "hidden_size", "num_attention_heads")
    described = {
        "num_layers": fields["num_hidden_layers"],
        "dim": fields["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": heads if fields["num_key_value_heads"] is None else fields["num_key_value_heads"],
        "head_dim": head_dim,
        "mlp_dim": fields["intermediate_size"],
        "vocab_size": fields["vocab_size"],
        "max_seq_len": fields["max_position_embeddings"],
        "norm_eps": fields["rms_norm_eps"],
        "tie_word_embeddings": fields["tie_word_embeddings"],
        "biases": "qkv" if kind == "qwen2" else _biases(fields),
        "attention_pattern": "G",
        **_rope(fields, given, kind),
    }
    if kind in OTHER_TYPES or FIELDS[kind].get("sliding_window", FIELDS[kind]["is_encoder_decoder"]).use == "read":
        described |= _windows(fields, kind)
    if kind in OTHER_TYPES:
        described |= delta_net(fields, described["attention_pattern"])
    if "num_experts_per_tok" in fields:
        described |= _experts(fields, given, kind)
    described |= {name: fields[name] for name in MULTIPLIERS if name in fields}
    if "attention_multiplier" in fields:
        if (scale := fields["attention_multiplier"]) <= 0:
            raise unsupported("attention_multiplier", scale, "a number above 0 is required")
        described["query_pre_attn_scalar"] = None if scale == head_dim**-0.5 else scale**-2
    if "query_pre_attn_scalar" in fields:
        scalar = fields["query_pre_attn_scalar"]
        described |= {
            "query_pre_attn_scalar": None if scalar == head_dim else scalar,
            "attn_logit_softcap": fields["attn_logit_softcapping"],
        }
    if "final_logit_softcapping" in fields:
        described["final_logit_softcap"] = fields["final_logit_softcapping"]
    return described | (gemma4_layers(fields, described["attention_pattern"]) if kind in GEMMA4_TEXT else {})


def _experts(fields: Mapping[str, Any], given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the keys of experts; of Qwen, transformers 5 writes their number under a name of its own."""
    name = "num_experts" if "num_experts" in fields else "num_local_experts"
    count, other = given.get(name), given.get("num_local_experts")
    if None not in (count, other) and count != other:
        raise unsupported("num_local_experts", other, f"num_experts is {count}")
    count = next(value for value in (count, other, fields[name]) if value is not None)
    per_token = fields["num_experts_per_tok"]
    if 1 < count < per_token:
        raise unsupported("num_experts_per_tok", per_token, f"{name} is {count}")
    shared = fields.get("shared_expert_intermediate_size", 0)
    if kind in OTHER_TYPES and not shared:
        raise unsupported("shared_expert_intermediate_size", shared, "all layers have one of all tokens")
    kept = {"per_token": per_token, "norm_topk_prob": fields.get("norm_topk_prob", True), "shared_dim": shared}
    width = fields.get("moe_intermediate_size", fields["intermediate_size"])
    return {"mlp_dim": width, "experts": {"count": count, **kept}}


def _biases(fields: Mapping[str, Any]) -> str:
    attention, mlp = fields.get("attention_bias", False), fields.get("mlp_bias", "swiglu_limit" in fields)
    return ("all" if mlp else "attention") if attention else "mlp" if mlp else "none"


def _windows(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return which layers are local, and their window; and which have no rotary positions."""
    count, types, window = fields["num_hidden_layers"], fields.get("layer_types"), fields.get("sliding_window")
    known = OTHER_TYPES.get(kind, LAYER_TYPES)
    if not fields.get("use_sliding_window", True):
        window = None
    if types is None:
        letters = _letters_without_types(fields, kind, window)
    else:
        if len(types) != count:
            raise unsupported("layer_types", types, f"a list of num_hidden_layers = {count} is required")
        if other := [name for name in types if not isinstance(name, str) or name not in known]:
            raise unsupported("layer_types", other[0], f"only {', '.join(known)}")
        letters = "".join(known[name] for name in types)
    rotated = zip(letters, _rotated(fields), strict=True)
    letters = "".join(letter if is_rotated else letter.lower() for letter, is_rotated in rotated)
    lengths = range(1, len(letters) + 1)
    pattern = next((letters[:n] for n in lengths if (letters[:n] * len(letters))[: len(letters)] == letters), "G")
    if "L" not in pattern.upper():
        return {"attention_pattern": pattern}
    if window is None:
        raise UnknownArchitectureError("config.json: layer_types has local layers, and there is no sliding_window")
    return {"attention_pattern": pattern, "sliding_window": window}


def _letters_without_types(fields: Mapping[str, Any], kind: str, window: int | None) -> str:
    count = fields["num_hidden_layers"]
    if kind in OTHER_TYPES:
        return "".join("D" if (i + 1) % fields["full_attention_interval"] else "G" for i in range(count))
    if (period := PERIODS.get(kind, fields.get("sliding_window_pattern"))) is not None:
        last = count - 1 if kind in GEMMA4_TEXT else None  # is global in any case
        return "".join("L" if (i + 1) % period and i != last else "G" for i in range(count))
    if window is None:
        return "G" * count
    if "no_rope_layers" in fields:
        return "".join("G" if rotated else "L" for rotated in _rotated(fields))
    return "".join("L" if i >= fields.get("max_window_layers", 0) else "G" for i in range(count))


def _rotated(fields: Mapping[str, Any]) -> list[bool]:
    """Return which layers have rotary positions."""
    count, listed = fields["num_hidden_layers"], fields.get("no_rope_layers")
    if listed is None:
        interval = fields.get("no_rope_layer_interval", count + 1)
        return [(i + 1) % interval != 0 for i in range(count)]
    if len(listed) != count or not all(_is_same(value, 0) or _is_same(value, 1) for value in listed):
        raise unsupported("no_rope_layers", listed, f"a list of num_hidden_layers = {count}, 1 or 0, is required")
    return [value == 1 for value in listed]


def _rope(fields: Mapping[str, Any], given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return rotary parameters from transformers 5 (rope_parameters) or 4 (rope_theta, rope_scaling) configs."""
    new = fields["rope_parameters"] or {}
    scaling = given.get("rope_scaling") if new else fields["rope_scaling"]
    if fields["rope_parameters"] is None:
        new = DEFAULT_ROTATIONS.get(kind, {})
    nested = bool(new.keys() & LAYER_TYPES.keys())
    if new and nested != (kind in BY_LAYER_TYPE):
        why = f"{kind} has {'one entry per layer type' if kind in BY_LAYER_TYPE else 'one for all layers'}"
        raise unsupported("rope_parameters", new, why)
    for name in LAYER_TYPES:
        require(f"rope_parameters.{name}", new.get(name), Mapping | NoneType)
    everywhere = dict((new.get("full_attention") if nested else new) or {})
    local = dict((new.get("sliding_attention") if nested else None) or {})
    if other := new.keys() - LAYER_TYPES.keys() if nested else ():
        raise unsupported("rope_parameters", sorted(other)[0], f"only {', '.join(LAYER_TYPES)}")
    if scaling and not everywhere.keys() - {"rope_theta"}:
        everywhere |= scaling
    elif scaling and _scaling(scaling, fields, kind) != _scaling(everywhere, fields, kind):
        raise unsupported("rope_scaling", scaling, "rope_parameters has other values")
    found: dict[str, Any] = {
        "rope_theta": _either(everywhere, "rope_theta", fields, given),
        "rope_local_theta": None,
        "rope_scaling": _scaling(everywhere, fields, kind),
    }
    if FIELDS[kind]["partial_rotary_factor"].use == "read":
        found["partial_rotary_factor"] = _either(everywhere, "partial_rotary_factor", fields, given)
    if kind in BY_LAYER_TYPE:
        name = "rope_local_base_freq" if kind == "gemma3_text" else "rope_theta"
        found["rope_local_theta"] = _either(local, name, fields, given)
        unsaid = any(part.get("rope_theta") is None for part in (everywhere, local))
        if kind == "olmo3" and unsaid and given.get("rope_theta") != OLMO3_THETA:
            why = "transformers 4 and 5 read it otherwise; set rope_theta for each layer type in rope_parameters"
            raise unsupported("rope_theta", given.get("rope_theta"), why)
        if _scaling(local, fields, kind) is not None:
            where = "rope_parameters.sliding_attention"
            raise unsupported(where, local, "the decoder does not scale the positions of local layers")
        if found["rope_scaling"] and not found["rope_scaling"].get("truncate", True):
            raise unsupported("rope_parameters.full_attention.truncate", False, "transformers ignores it there")
    return found


def _either(parameters: Mapping[str, Any], name: str, fields: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Return a rotary field: rope_parameters', or that of transformers 4; both must agree."""
    value = parameters.get("rope_theta" if name == "rope_local_base_freq" else name)
    if value is None:
        return fields[name]
    if given.get(name) not in (None, value):
        raise unsupported(name, given[name], f"rope_parameters has {value!r}")
    return value


def _scaling(parameters: Mapping[str, Any], fields: Mapping[str, Any], of: str) -> dict[str, Any] | None:
    """Return `model.rope_scaling` for rope_parameters or rope_scaling, with transformers' defaults."""
    for name, value in parameters.items():
        require(f"rotary {name}", value, ROPE_TYPES.get(name, object))
    kind, older = parameters.get("rope_type"), parameters.get("type")
    if kind and older and kind != older:
        raise unsupported("rotary type", older, f"rope_type is {kind!r}")
    kind = kind or older or "default"
    allowed = ROTATIONS.get(of, ANY_ROTATION)
    if kind not in allowed:
        raise unsupported("rope_type", kind, f"only {', '.join(allowed)}")
    required, optional = ROPE_FIELDS[kind]
    given = parameters.keys()
    if of == "ministral3":  # transformers computes with both, and has no defaults
        required = required | {"original_max_position_embeddings", "llama_4_scaling_beta"}
        given = {name for name in given if parameters[name] or name == "llama_4_scaling_beta"}
    if missing := required - given:
        raise UnknownArchitectureError(f"config.json: rope_type {kind}: {sorted(missing)[0]} is missing")
    known = {"rope_type", "type", "rope_theta", *required, *optional}
    known |= {"max_position_embeddings"} if of == "ministral3" else set()  # transformers does not read it
    if parameters.get("partial_rotary_factor") in (None, 1.0) or FIELDS[of]["partial_rotary_factor"].use == "read":
        known = known | {"partial_rotary_factor"}
    known |= {"mrope_section", "mrope_interleaved"} if of in OTHER_TYPES else set()  # text has one position, thrice
    if other := parameters.keys() - known:
        raise unsupported(f"rope_type {kind}", sorted(other)[0], "unknown field")
    if kind == "default":
        return None
    found = {name: parameters[name] for name in required}
    found |= {name: parameters.get(name, default) for name, default in optional.items()}
    if "original_max_position_embeddings" in found:
        named = fields["original_max_position_embeddings"]  # only Phi-3's is read, and it wins
        if named and found["original_max_position_embeddings"] not in (None, named):
            at = "original_max_position_embeddings"
            raise unsupported(f"rotary {at}", found[at], f"{at} is {named}")
        original = named or found["original_max_position_embeddings"] or fields["max_position_embeddings"]
        found["original_max_position_embeddings"] = original
    if kind == "longrope":
        found = longrope(found, fields["max_position_embeddings"])
    return {"kind": kind, **(yarn(found) if kind == "yarn" else found)}

"""Hugging Face's tensor names, shapes and configs of the supported models: one bidirectional table per family.

config.json and tensor names as of transformers 5 (https://huggingface.co/docs/transformers/model_doc/gemma2 and so on).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from conf.schema.training.model import Model, family_switches

FAMILIES = {
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "llama": "llama3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gpt2": "gpt2",
}
"""Maps model_type of config.json to our family."""
NAME_PREFIXES = ("model.", "transformer.", "language_model.model.", "model.language_model.", "")
"""Prefixes of tensor names: some checkpoints hold the bare decoder, some a vision-language model."""
Arrays = tuple[np.ndarray, ...]


class UnknownArchitectureError(ValueError):
    """config.json describes a model that the decoder does not support."""


class TensorMapping(NamedTuple):
    """One HF tensor and the weight it maps to. `ours` are keys of the tree, or of its "layers"."""

    hf_name: str  # with {i} for the layer index
    param_names: tuple[str, ...]
    read: Callable[[np.ndarray], Arrays]
    write: Callable[..., np.ndarray]

    @property
    def is_per_layer(self) -> bool:
        return "{i}" in self.hf_name


def model_from_config(config: dict[str, Any], **compute: Any) -> Model:
    """Return our model config for a config.json.

    compute: keys of `Model` that set how it is computed; the others come from config.json and the family.

    Raises:
        UnknownArchitectureError: config.json contains something that `Model` cannot express.
    """
    config = {**config, **config.get("text_config", {})}
    kind = config.get("model_type", "")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnknownArchitectureError(f"config.json: model_type {kind!r} is not one of {known}")
    try:
        described = _gpt2_fields(config) if kind == "gpt2" else _rotary_fields(config)
        return Model.model_validate({**family_switches(FAMILIES[kind]), **described, **compute})
    except KeyError as error:
        raise UnknownArchitectureError(f"config.json: {error} of {kind} is missing") from None
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(map(str, found["loc"])) or "model"
        raise UnknownArchitectureError(f"config.json: {key} of {kind}: {found['msg']}") from None


def hf_config(cfg: Model) -> dict[str, Any]:
    """Return a config.json from which transformers builds the same model. Raises UnknownArchitectureError."""
    kind = next((kind for kind, family in FAMILIES.items() if family == family_of(cfg)), None)
    if kind is None:
        raise UnknownArchitectureError("model: transformers has no architecture with these settings")
    classes = {"gemma2": "Gemma2", "gemma3_text": "Gemma3", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    common = {
        "model_type": kind,
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else f"{classes[kind]}ForCausalLM"],
        "vocab_size": cfg.vocab_size,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "dtype": "float32",
    }
    if kind == "gpt2":
        return common | {
            "n_layer": cfg.num_layers, "n_embd": cfg.dim, "n_head": cfg.num_heads, "n_inner": cfg.mlp_dim,
            "n_positions": cfg.max_seq_len, "layer_norm_epsilon": cfg.norm_eps, "activation_function": "gelu_new",
        }  # fmt: skip
    return common | _rotary_config(cfg, kind)


COMMON_KEYS = {"norm_eps", "max_seq_len"}
"""Model keys that every config.json contains."""
ROTARY_KEYS = {"rope_theta", "rope_scaling", "tie_word_embeddings"}
GEMMA_KEYS = ROTARY_KEYS | {
    "attention_pattern",
    "sliding_window",
    "query_pre_attn_scalar",
    "attn_logit_softcap",
    "final_logit_softcap",
}
KEYS_BY_FAMILY = {
    "gemma2": GEMMA_KEYS,
    "gemma3": GEMMA_KEYS | {"rope_local_theta"},
    "llama3": ROTARY_KEYS,
    "qwen2": ROTARY_KEYS,
    "qwen3": ROTARY_KEYS,
    "gpt2": set[str](),
}
"""Further model keys per family."""
COMPUTE_KEYS = {"init", "activation_dtype", "attention", "scan_layers", "remat", "logit_chunk", "weights"}
"""Model keys without a counterpart in config.json: initial values, and how the model is computed."""


def family_of(cfg: Model) -> str | None:
    """Return the family whose config.json can express the model, or None."""
    for name, said in KEYS_BY_FAMILY.items():
        free = COMMON_KEYS | said | COMPUTE_KEYS
        if cfg.attention_pattern == family_switches(name)["attention_pattern"] == "G":
            free |= {"sliding_window"}  # of no layer
        if all(getattr(cfg, key) == value for key, value in family_switches(name).items() if key not in free):
            return name
    return None


def tensor_mappings(cfg: Model) -> Iterator[TensorMapping]:
    """Yield all tensors of a checkpoint of the model. Raises UnknownArchitectureError for an unsupported family."""
    family = family_of(cfg)
    if family is None:
        raise UnknownArchitectureError("model: transformers has no architecture with these settings")
    if family == "gpt2":
        yield from _gpt2_tensors(cfg)
        return
    yield _copied("embed_tokens.weight", "embedding")
    yield _copied("norm.weight", "final_norm")
    if not cfg.tie_word_embeddings:
        yield _copied("lm_head.weight", "unembedding")
    layer = "layers.{i}."
    yield _copied(f"{layer}input_layernorm.weight", "attention_norm")
    after = "post_attention_norm" if cfg.post_norms else "mlp_norm"
    yield _copied(f"{layer}post_attention_layernorm.weight", after)
    if cfg.post_norms:
        yield _copied(f"{layer}pre_feedforward_layernorm.weight", "mlp_norm")
        yield _copied(f"{layer}post_feedforward_layernorm.weight", "post_mlp_norm")
    for letter, name, heads in (
        ("q", "query", cfg.num_heads),
        ("k", "key", cfg.num_kv_heads),
        ("v", "value", cfg.num_kv_heads),
    ):
        yield _split_heads(f"{layer}self_attn.{letter}_proj.weight", name, heads)
        if cfg.biases == "qkv":
            yield _with_shape(f"{layer}self_attn.{letter}_proj.bias", f"{name}_bias", (heads, cfg.head_dim))
        if cfg.qk_norm != "none" and name != "value":
            yield _copied(f"{layer}self_attn.{letter}_norm.weight", f"{name}_norm")
    yield _merge_heads(f"{layer}self_attn.o_proj.weight", "output", cfg.num_heads)
    for name in ("gate", "up", "down"):
        yield TensorMapping(f"{layer}mlp.{name}_proj.weight", (name,), lambda x: (x.T,), lambda x: x.T)


def _gpt2_tensors(cfg: Model) -> Iterator[TensorMapping]:
    heads = (cfg.num_heads, cfg.head_dim)
    layer = "h.{i}."
    yield _copied("wte.weight", "embedding")
    yield _copied("wpe.weight", "position_embedding")
    for theirs, ours in (("ln_f", "final_norm"), (f"{layer}ln_1", "attention_norm"), (f"{layer}ln_2", "mlp_norm")):
        yield _copied(f"{theirs}.weight", ours)
        yield _copied(f"{theirs}.bias", f"{ours}_bias")
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        yield TensorMapping(
            f"{layer}attn.c_attn.{kind}",
            tuple(f"{name}{suffix}" for name in ("query", "key", "value")),
            lambda x: tuple(part.reshape(*part.shape[:-1], *heads) for part in np.split(x, 3, axis=-1)),
            lambda *parts: np.concatenate([part.reshape(*part.shape[:-2], -1) for part in parts], axis=-1),
        )
    yield _with_shape(f"{layer}attn.c_proj.weight", "output", (*heads, cfg.dim), joined=(-1, cfg.dim))
    yield _copied(f"{layer}attn.c_proj.bias", "output_bias")
    for theirs, ours in (("c_fc", "up"), ("c_proj", "down")):
        yield _copied(f"{layer}mlp.{theirs}.weight", ours)
        yield _copied(f"{layer}mlp.{theirs}.bias", f"{ours}_bias")


def _copied(theirs: str, ours: str) -> TensorMapping:
    return TensorMapping(theirs, (ours,), lambda x: (x,), lambda x: x)


def _with_shape(theirs: str, ours: str, shape: tuple[int, ...], joined: tuple[int, ...] = (-1,)) -> TensorMapping:
    return TensorMapping(theirs, (ours,), lambda x: (x.reshape(shape),), lambda x: x.reshape(joined))


def _split_heads(theirs: str, ours: str, heads: int) -> TensorMapping:
    """Map [heads * head_dim, dim] to [dim, heads, head_dim]."""
    return TensorMapping(
        theirs, (ours,), lambda x: (x.T.reshape(x.shape[1], heads, -1),), lambda x: x.reshape(x.shape[0], -1).T
    )


def _merge_heads(theirs: str, ours: str, heads: int) -> TensorMapping:
    """Map [dim, heads * head_dim] to [heads, head_dim, dim]."""
    return TensorMapping(
        theirs, (ours,), lambda x: (x.T.reshape(heads, -1, x.shape[0]),), lambda x: x.reshape(-1, x.shape[-1]).T
    )


def _gpt2_fields(config: dict[str, Any]) -> dict[str, Any]:
    dim, heads = config["n_embd"], config["n_head"]
    _reject_unsupported(config, activation_function=("gelu_new",), scale_attn_by_inverse_layer_idx=(False,))
    _reject_unsupported(config, scale_attn_weights=(True,), add_cross_attention=(False,), tie_word_embeddings=(True,))
    return {
        "num_layers": config["n_layer"], "dim": dim, "num_heads": heads, "num_kv_heads": heads,
        "head_dim": dim // heads, "mlp_dim": config.get("n_inner") or 4 * dim, "vocab_size": config["vocab_size"],
        "max_seq_len": config["n_positions"], "norm_eps": config["layer_norm_epsilon"],
    }  # fmt: skip


def _rotary_fields(config: dict[str, Any]) -> dict[str, Any]:
    kind = config["model_type"]
    gemma = kind.startswith("gemma")
    activation = config.get("hidden_activation") if gemma else config.get("hidden_act")
    if activation not in (("gelu_pytorch_tanh",) if gemma else ("silu",)):
        raise UnknownArchitectureError(f"config.json: activation {activation!r} of {kind} is not supported")
    _reject_unsupported(config, attention_bias=(False, None), mlp_bias=(False, None), use_sliding_window=(False, None))
    _reject_unsupported(config, use_bidirectional_attention=(False, None), pretraining_tp=(1, None))
    described = {
        "num_layers": config["num_hidden_layers"],
        "dim": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "mlp_dim": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
        "tie_word_embeddings": config.get("tie_word_embeddings", gemma),
        **_rope_parameters(config),
    }
    if gemma:
        scalar = config["query_pre_attn_scalar"]
        described |= {
            "sliding_window": config["sliding_window"],
            "attention_pattern": _pattern(config, kind),
            "query_pre_attn_scalar": None if scalar == described["head_dim"] else scalar,
            "attn_logit_softcap": config.get("attn_logit_softcapping"),
            "final_logit_softcap": config.get("final_logit_softcapping"),
        }
    return described


def _pattern(config: dict[str, Any], kind: str) -> str:
    types = config.get("layer_types")
    if types is None:
        period = 2 if kind == "gemma2" else config.get("sliding_window_pattern", 6)
        return "L" * (period - 1) + "G"
    letters = "".join("L" if name == "sliding_attention" else "G" for name in types)
    lengths = range(1, len(letters) + 1)
    return next(letters[:n] for n in lengths if (letters[:n] * len(letters))[: len(letters)] == letters)


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters from transformers 5 (rope_parameters) or 4 (rope_theta, rope_scaling) configs."""
    given = config.get("rope_parameters") or {}
    everywhere = given.get("full_attention", given)
    local = given.get("sliding_attention", {}).get("rope_theta") or config.get("rope_local_base_freq")
    base = everywhere.get("rope_theta") or config.get("rope_theta", 10000.0)
    scaling = (everywhere if everywhere.get("rope_type") else config.get("rope_scaling")) or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    found: dict[str, Any] = {"rope_theta": base, "rope_local_theta": local, "rope_scaling": None}
    if kind == "linear":
        found["rope_scaling"] = {"kind": "linear", "factor": scaling["factor"]}
    elif kind == "llama3":
        found["rope_scaling"] = {
            "kind": "llama3",
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        }
    elif kind != "default":
        raise UnknownArchitectureError(f"config.json: rope_type {kind!r} is not supported")
    return found


def _rotary_config(cfg: Model, kind: str) -> dict[str, Any]:
    gemma = kind.startswith("gemma")
    written: dict[str, Any] = {
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": cfg.dim,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.mlp_dim,
        "max_position_embeddings": cfg.max_seq_len,
        "rms_norm_eps": cfg.norm_eps,
        "hidden_activation" if gemma else "hidden_act": "gelu_pytorch_tanh" if gemma else "silu",
        "rope_theta": cfg.rope_theta,
    }
    if (scaling := cfg.rope_scaling) is not None:
        written["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            written["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
    if gemma:
        letters = (cfg.attention_pattern * cfg.num_layers)[: cfg.num_layers]
        names = {"L": "sliding_attention", "G": "full_attention"}
        scalar = cfg.query_pre_attn_scalar or cfg.head_dim
        written |= {
            "sliding_window": cfg.sliding_window,
            "layer_types": [names[letter] for letter in letters],
            "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,  # must be an integer
            "attn_logit_softcapping": cfg.attn_logit_softcap,
            "final_logit_softcapping": cfg.final_logit_softcap,
        }
    if cfg.rope_local_theta is not None:
        written["rope_local_base_freq"] = cfg.rope_local_theta
    return written


def _reject_unsupported(config: dict[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise UnknownArchitectureError(f"config.json: {key}: {config[key]!r} is not supported")

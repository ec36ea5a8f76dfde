"""Hugging Face's tensor names and shapes of the supported models, and the config.json that describes a model of ours.

Tensor names as of transformers 5 (https://huggingface.co/docs/transformers/model_doc/gemma2 and so on).
`conf/config_json.py` reads config.json.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from conf.config_json import ARCHITECTURES, BY_LAYER_TYPE, FAMILIES, LAYER_TYPES, MULTIPLIERS, UnknownArchitectureError
from conf.config_json import model_from_config as model_from_config
from conf.config_json import without_unknown_fields as without_unknown_fields
from conf.hugging_face_fields import FIELDS
from conf.hugging_face_rotation import ANY_ROTATION, ROTATIONS
from conf.schema.training.layer_kinds import holders, layer_kinds, sized, stack_name
from conf.schema.training.model import Model, family_switches

Arrays = tuple[np.ndarray, ...]


class TensorMapping(NamedTuple):
    """One HF tensor and the weight it maps to. `ours` are keys of the tree, or of its "layers"."""

    hf_name: str  # with {i} for the layer index
    param_names: tuple[str, ...]
    read: Callable[[np.ndarray], Arrays]
    write: Callable[..., np.ndarray]
    is_stacked: bool = False  # the tensor has all layers, as ours

    @property
    def is_per_layer(self) -> bool:
        return "{i}" in self.hf_name

    @property
    def in_layers(self) -> bool:
        return self.is_per_layer or self.is_stacked

    def names(self, cfg: Model) -> dict[str, int]:
        """Return the tensor's names, one or one per layer, with their places in the stack."""
        if not self.is_per_layer:
            return {self.hf_name: 0}
        layers = holders(cfg, self.param_names[0], range(cfg.num_layers))
        return {self.hf_name.format(i=layer): place for place, layer in enumerate(layers)}


def hf_config(cfg: Model) -> dict[str, Any]:
    """Return a config.json from which transformers builds the same model. Raises UnknownArchitectureError."""
    found = family_of(cfg)
    kind = next((kind for kind, family in FAMILIES.items() if family == found), None)
    if kind is None:
        raise UnknownArchitectureError(_why_unpublished(cfg))
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


COMMON_KEYS = {"norm_eps", "max_seq_len", "family"}
"""Model keys that every config.json contains, and the family, which it is."""
ROTARY_KEYS = {"rope_theta", "rope_scaling", "tie_word_embeddings", "biases"}
WINDOW_KEYS = {"attention_pattern", "sliding_window"}
GEMMA_KEYS = ROTARY_KEYS | WINDOW_KEYS | {"query_pre_attn_scalar", "final_logit_softcap"}
KEYS_BY_FAMILY = {
    "gemma2": GEMMA_KEYS | {"attn_logit_softcap"},
    "gemma3": GEMMA_KEYS | {"rope_local_theta"},
    "llama3": ROTARY_KEYS,
    "qwen2": ROTARY_KEYS | WINDOW_KEYS,
    "qwen3": ROTARY_KEYS | WINDOW_KEYS,
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
}
"""Further model keys per family."""
BIASES_BY_FAMILY = {
    "gemma2": ("none", "attention"),
    "gemma3": ("none", "attention"),
    "llama3": ("none", "attention", "mlp", "all"),
    "qwen2": ("qkv",),
    "qwen3": ("none", "attention"),
    "gpt2": ("all",),
    "smollm3": ("none", "attention", "mlp", "all"),
    "granite": ("none", "attention", "mlp", "all"),
    **dict.fromkeys(("gemma", "olmo2", "olmo3", "gemma4"), ("none", "attention")),
    **dict.fromkeys(("mistral", "ministral", "ministral3", "phi3"), ("none",)),
}
"""Values of `model.biases` per family."""
PATTERNS = {"mistral": "L+|G+", "ministral3": "L+|G+", "phi3": "L+|G+", "smollm3": "[LGlg]+"}
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
}
"""Model keys without a counterpart in config.json: initial values, and how the model is computed."""


def family_of(cfg: Model) -> str | None:
    """Return the family whose config.json can express the model, its own if it can, or None."""
    for name, said in sorted(KEYS_BY_FAMILY.items(), key=lambda item: item[0] != cfg.family):
        free = COMMON_KEYS | said | COMPUTE_KEYS
        if cfg.attention_pattern == "G":
            free |= {"sliding_window"}  # of no layer
        if cfg.biases not in BIASES_BY_FAMILY[name]:
            continue
        if not re.fullmatch(PATTERNS.get(name, "[LG]+"), cfg.attention_pattern):
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


def _why_unpublished(cfg: Model) -> str:
    for key, usual in (("residual", "plain"), ("attention_form", "causal")):
        if (value := getattr(cfg, key)) != usual:
            return f"model.{key}: no published layout of weights has {value}, only {usual}"
    return "model: transformers has no architecture with these settings"


def tensor_mappings(cfg: Model) -> Iterator[TensorMapping]:
    """Yield all tensors of a checkpoint of the model. Raises UnknownArchitectureError for an unsupported family."""
    family = family_of(cfg)
    if family is None:
        raise UnknownArchitectureError(_why_unpublished(cfg))
    if family == "gpt2":
        yield from _gpt2_tensors(cfg)
        return
    yield _copied("embed_tokens.weight", "embedding")
    yield _copied("norm.weight", "final_norm")
    if not cfg.tie_word_embeddings:
        yield _copied("lm_head.weight", "unembedding")
    if cfg.per_layer_dim:
        yield from _per_layer_tables(cfg)
    seen: set[tuple[str | None, ...]] = set()
    for kind in dict.fromkeys(layer_kinds(cfg)):
        for tensor in _layer_tensors(sized(cfg, kind), family):
            stacks = tuple(stack_name(cfg, name, kind) for name in tensor.param_names)
            if None not in stacks and stacks not in seen:
                seen.add(stacks)
                yield tensor._replace(param_names=stacks)


def tensors_without_use(cfg: Model) -> set[str]:
    """Return names of tensors that a checkpoint may have and the model does not compute with."""
    shared = range(cfg.num_layers - cfg.num_kv_shared_layers, cfg.num_layers)
    return {f"layers.{i}.self_attn.{part}.weight" for i in shared for part in ("k_proj", "v_proj", "k_norm", "v_norm")}


def _per_layer_tables(cfg: Model) -> Iterator[TensorMapping]:
    """Yield Gemma 4's tensors of all layers side by side, which are stacked here."""
    layers, width = cfg.num_layers, cfg.per_layer_dim
    yield TensorMapping(
        "embed_tokens_per_layer.weight",
        ("per_layer_table",),
        lambda x: (x.reshape(-1, layers, width).swapaxes(0, 1),),
        lambda x: x.swapaxes(0, 1).reshape(-1, layers * width),
        is_stacked=True,
    )
    yield TensorMapping(
        "per_layer_model_projection.weight",
        ("per_layer_input",),
        lambda x: (x.reshape(layers, width, -1).swapaxes(1, 2),),
        lambda x: x.swapaxes(1, 2).reshape(layers * width, -1),
        is_stacked=True,
    )
    yield _copied("per_layer_projection_norm.weight", "per_layer_norm")


def _layer_tensors(cfg: Model, family: str) -> Iterator[TensorMapping]:
    """Yield the tensors of a layer with the model's sizes."""
    layer = "layers.{i}."
    if cfg.pre_norms:
        yield _copied(f"{layer}input_layernorm.weight", "attention_norm")
    after = "post_attention_norm" if cfg.post_norms else "mlp_norm"
    yield _copied(f"{layer}post_attention_layernorm.weight", after)
    if cfg.post_norms:
        if cfg.pre_norms:
            yield _copied(f"{layer}pre_feedforward_layernorm.weight", "mlp_norm")
        yield _copied(f"{layer}post_feedforward_layernorm.weight", "post_mlp_norm")
    yield _merge_heads(f"{layer}self_attn.o_proj.weight", "output", cfg.num_heads)
    if family == "phi3":
        yield from _fused_tensors(cfg, layer)
        return
    for letter, name, heads in (
        ("q", "query", cfg.num_heads),
        ("k", "key", cfg.num_kv_heads),
        ("v", "value", cfg.num_kv_heads),
    ):
        yield _split_heads(f"{layer}self_attn.{letter}_proj.weight", name, heads)
        if cfg.biases in ("qkv", "attention", "all"):
            yield _with_shape(f"{layer}self_attn.{letter}_proj.bias", f"{name}_bias", (heads, cfg.head_dim))
        if cfg.qk_norm != "none" and name != "value":
            shape = (heads, cfg.head_dim) if cfg.qk_norm == "whole" else (cfg.head_dim,)
            yield _with_shape(f"{layer}self_attn.{letter}_norm.weight", f"{name}_norm", shape)
    if cfg.biases in ("attention", "all"):
        yield _copied(f"{layer}self_attn.o_proj.bias", "output_bias")
    for name in ("gate", "up", "down"):
        yield _turned(f"{layer}mlp.{name}_proj.weight", name)
        if cfg.biases in ("mlp", "all"):
            yield _copied(f"{layer}mlp.{name}_proj.bias", f"{name}_bias")
    if cfg.per_layer_dim:
        yield _turned(f"{layer}per_layer_input_gate.weight", "per_layer_gate")
        yield _turned(f"{layer}per_layer_projection.weight", "per_layer_output")
        yield _copied(f"{layer}post_per_layer_input_norm.weight", "post_per_layer_norm")
    if cfg.layer_scalars:
        yield _with_shape(f"{layer}layer_scalar", "layer_scale", (), joined=(1,))


def _fused_tensors(cfg: Model, layer: str) -> Iterator[TensorMapping]:
    """Yield Phi-3's two products of several: rows of query, key and value, and of gate and up."""
    heads = (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)
    ends = tuple(np.cumsum(heads)[:-1] * cfg.head_dim)

    def split(x: np.ndarray) -> Arrays:
        parts = zip(np.split(x, ends), heads, strict=True)
        return tuple(part.T.reshape(x.shape[1], count, cfg.head_dim) for part, count in parts)

    def joined(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([part.reshape(part.shape[0], -1).T for part in parts])

    yield TensorMapping(f"{layer}self_attn.qkv_proj.weight", ("query", "key", "value"), split, joined)
    halves = partial(np.split, indices_or_sections=2)
    yield TensorMapping(
        f"{layer}mlp.gate_up_proj.weight", ("gate", "up"), lambda x: tuple(part.T for part in halves(x)), joined
    )
    yield _turned(f"{layer}mlp.down_proj.weight", "down")


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


def _turned(theirs: str, ours: str) -> TensorMapping:
    return TensorMapping(theirs, (ours,), lambda x: (x.T,), lambda x: x.T)


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
    if cfg.biases in ("attention", "all"):
        written["attention_bias"] = True
    if cfg.biases in ("mlp", "all"):
        written["mlp_bias"] = True
    written |= _window_fields(cfg, letters, known)
    written |= {name: getattr(cfg, name) for name in MULTIPLIERS if name in known}
    if "attention_multiplier" in known:  # in the digits that a double holds for certain
        written["attention_multiplier"] = float(f"{(cfg.query_pre_attn_scalar or cfg.head_dim) ** -0.5:.15g}")
    if "no_rope_layers" in known:
        written["no_rope_layers"] = [int(letter.isupper()) for letter in letters]
    if known["partial_rotary_factor"].use == "read":
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
    return written | _gemma4_fields(cfg, written) if kind == "gemma4_text" else written


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

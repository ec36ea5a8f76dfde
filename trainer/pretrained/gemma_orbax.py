"""Gemma as Google DeepMind publishes it for JAX: the parameters of its flax modules, in an Orbax checkpoint.

Names and shapes as of https://github.com/google-deepmind/gemma: `transformer/layer_0/attn/q_einsum` holds `w`
[heads, dim, head_dim], and so on. The first of the two halves of `gating_einsum` goes through the activation.
"""

import re
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from conf.schema.training.model import Model
from trainer.models.weights import Params, weight_table
from trainer.pretrained.hf_files import PretrainedError

LAYER_NAME = re.compile(r"layer_(\d+)/(.+)")
NORM_NAMES = {
    "pre_attention_norm": "attention_norm",
    "post_attention_norm": "post_attention_norm",
    "pre_ffw_norm": "mlp_norm",
    "post_ffw_norm": "post_mlp_norm",
    "attn/_query_norm": "query_norm",
    "attn/_key_norm": "key_norm",
}


def is_checkpoint(folder: epath.Path) -> bool:
    """Return whether the folder holds an Orbax checkpoint."""
    signs = ("_METADATA", "_CHECKPOINT_METADATA", "checkpoint", "manifest.ocdbt")
    return any((folder / name).exists() for name in signs)


def read_params(folder: epath.Path, cfg: Model) -> Params:
    """Return all weights of the model as NumPy arrays, in the tree of `weight_table`.

    Raises:
        PretrainedError: a weight is missing, or the checkpoint is of another model.
    """
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(folder)
    table = weight_table(cfg)
    params: Params = {"layers": {}}
    for path, array in jax.tree.leaves_with_path(tree):
        name = _normalized_name(jax.tree_util.keystr(path, simple=True, separator="/"))
        layer = LAYER_NAME.fullmatch(name)
        found = (
            _layer_weights(layer[2], np.asarray(array), cfg) if layer else _model_weights(name, np.asarray(array), cfg)
        )
        for ours, part in found.items():
            wanted = table["layers"][ours].shape[1:] if layer else table[ours].shape
            if part.shape != wanted:
                raise PretrainedError(f"{folder}: {name} has shape {part.shape}, but the model's {ours} has {wanted}")
            if layer is None:
                params[ours] = part
            elif int(layer[1]) >= cfg.num_layers:
                raise PretrainedError(f"{folder}: has more layers than the model's {cfg.num_layers}")
            else:
                stacked = params["layers"].setdefault(ours, [None] * cfg.num_layers)
                stacked[int(layer[1])] = part
    missing = {*table, *table["layers"]} - {*params, *params["layers"]}
    missing |= {name for name, parts in params["layers"].items() if any(part is None for part in parts)}
    if missing:
        raise PretrainedError(f"{folder}: {', '.join(sorted(missing))} missing in some of the {cfg.num_layers} layers")
    params["layers"] = {name: np.stack(parts) for name, parts in params["layers"].items()}
    return params


def _normalized_name(name: str) -> str:
    """Strip the collection and model names, which differ between releases, and the name of the single array."""
    for start in ("params/", "transformer/"):
        name = name.removeprefix(start)
    return re.sub(r"/(w|scale)$", "", name)


def _model_weights(name: str, array: np.ndarray, cfg: Model) -> dict[str, Any]:
    if name == "embedder/input_embedding":
        return {"embedding": array[: cfg.vocab_size]}
    return {"final_norm": array} if name == "final_norm" else {}  # skip the vision tower


def _layer_weights(name: str, array: np.ndarray, cfg: Model) -> dict[str, Any]:
    if name in NORM_NAMES:
        return {NORM_NAMES[name]: array}
    match name:
        case "attn/q_einsum":
            return {"query": array.swapaxes(0, 1)}
        case "attn/kv_einsum":
            return {"key": array[0].swapaxes(0, 1), "value": array[1].swapaxes(0, 1)}
        case "attn/qkv_einsum":
            return dict(zip(("query", "key", "value"), array.swapaxes(1, 2), strict=True))
        case "attn/attn_vec_einsum":
            return {"output": array}
        case "mlp/gating_einsum":  # [2, hidden, dim], in older releases [2, dim, hidden]
            gate, up = array.swapaxes(1, 2) if array.shape[1] == cfg.mlp_dim else array
            return {"gate": gate, "up": up}
        case "mlp/linear":
            return {"down": array}
        case _:
            return {}

"""LoRA adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

Names and keys as of PEFT 0.18 (https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from conf.schema.training.model import AnyModel, Model
from trainer.models.weights import Params, weight_table
from trainer.pretrained import hf_families, hf_files
from trainer.pretrained.run_weights import StoreError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
PLAIN: dict[str, Any] = {"peft_type": "LORA", "bias": "none"}
"""Values of adapter_config.json of a plain LoRA."""
BASE_KEPT = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base model as it is; PiSSA, OLoRA, CorDA and so on change its weights."""
KNOWN = (
    *("r", "lora_alpha", "use_rslora", "init_lora_weights"),
    *("peft_version", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_pattern"),  # the tensors say it
    *("lora_dropout", "eva_config", "loftq_config", "fan_in_fan_out", "ensure_weight_tying"),  # of training
    *("megatron_config", "megatron_core", "qalora_group_size"),  # of layers that are refused by other keys
)
"""Keys of adapter_config.json that are read or change no plain adapter. Others must be false or empty."""


class _Adapter(NamedTuple):
    """One adapted module of a layer in PEFT's file. name: of our matrix; layer: None outside of the layers."""

    module: str
    name: str
    layer: int | None


def write_adapter(folder: epath.Path, params: Params, cfg: AnyModel) -> None:
    """Write the adapters of the weights, as NumPy reads them. Raises StoreError if there are none."""
    if not isinstance(cfg, Model) or cfg.lora is None:
        raise StoreError("model.lora: the weights have no adapters; use `--format hf`")
    tensors: dict[str, np.ndarray] = {}
    found = list(_adapters(cfg))
    for adapter in found:
        for part, array in zip("AB", _to_peft(params, adapter, cfg.lora.r), strict=True):
            tensors[f"{PREFIX}{adapter.module}.lora_{part}.weight"] = np.ascontiguousarray(array, np.float32)
    config = PLAIN | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": cfg.weights,
        "r": cfg.lora.r,
        "lora_alpha": cfg.lora.lora_alpha,
        "use_rslora": cfg.lora.use_rslora,
        "target_modules": sorted({adapter.module.rpartition(".")[2] for adapter in found}),
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    hf_files.write_safetensors(folder / WEIGHTS_FILE, tensors)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read_adapter(folder: epath.Path, cfg: Model) -> Params:
    """Return the adapters of PEFT's files, as NumPy arrays in the tree of `weight_table`.

    Raises StoreError: files are missing or damaged, or the adapter is not the one that `model.lora` describes.
    """
    _check_config(folder, cfg)
    wanted = {f"{PREFIX}{a.module}.lora_{part}.weight": (a, part) for a in _adapters(cfg) for part in "AB"}
    table, params = weight_table(cfg), dict[str, Any]()
    try:
        for key, array in hf_files.iter_file(folder / WEIGHTS_FILE):
            if key.endswith(".base_layer.weight"):
                continue  # PEFT saves the frozen output layer beside its adapter
            if key not in wanted:
                raise StoreError(f"{folder}: the tensor {key} is of no matrix of model.lora.target_modules")
            adapter, part = wanted.pop(key)
            _copy_into(params, table, adapter, part, array)
    except hf_files.PretrainedError as error:
        raise StoreError(f"model.lora.adapter: {error}") from None
    if wanted:
        raise StoreError(f"{folder}: {len(wanted)} tensors are missing, such as {min(wanted)}")
    return params


def _check_config(folder: epath.Path, cfg: Model) -> None:
    assert cfg.lora is not None, "the caller has adapters"
    try:
        found = json.loads((folder / CONFIG_FILE).read_text())
        scale = found["lora_alpha"] / (found["r"] ** 0.5 if found.get("use_rslora") else found["r"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise StoreError(f"model.lora.adapter: {folder} has no valid {CONFIG_FILE} of PEFT") from None
    for key, value in (PLAIN | {"r": cfg.lora.r}).items():
        if found.get(key) != value:
            raise StoreError(f"model.lora: {key} is {found.get(key)!r} in {folder}, not {value!r}")
    if scale != cfg.lora.scale:
        raise StoreError(
            f"model.lora.lora_alpha: adapters of {folder} are multiplied by {scale:g}, not {cfg.lora.scale:g}"
        )
    if (start := found.get("init_lora_weights")) not in BASE_KEPT:
        raise StoreError(
            f"model.lora.adapter: {folder} has init_lora_weights {start!r}, which may have changed the base model; "
            "convert it to a plain LoRA with PEFT's path_initial_model_for_weight_conversion"
        )
    if key := next((key for key, value in found.items() if value and key not in (*PLAIN, *KNOWN)), None):
        raise StoreError(f"model.lora.adapter: {folder} uses {key}, which Slipway's adapters do not have")


def _adapters(cfg: Model) -> Iterator[_Adapter]:
    """Yield the adapters of the model. Raises StoreError if PEFT has no place for one."""
    table = weight_table(cfg)
    named = {name.removesuffix("_lora_a") for name in (*table, *table["layers"]) if name.endswith("_lora_a")}
    for tensor in hf_families.tensor_mappings(cfg):
        if named.isdisjoint(tensor.param_names):
            continue
        if cfg.norm == "layer" or len(tensor.param_names) != 1:
            family = cfg.family or "GPT-2"
            raise StoreError(f"model.lora: {family} has one matrix for several of ours in PEFT; use `--format hf`")
        module, (name,) = tensor.hf_name.removesuffix(".weight"), tensor.param_names
        if not tensor.is_per_layer:
            yield _Adapter(module, name, None)
            continue
        for layer in range(cfg.num_layers):
            yield _Adapter(f"model.{module.format(i=layer)}", name, layer)


def _to_peft(params: Params, adapter: _Adapter, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return A [r, inputs] and B [outputs, r]."""
    tree = params if adapter.layer is None else params["layers"]
    a, b = (np.asarray(tree[f"{adapter.name}_lora_{part}"]) for part in "ab")
    if adapter.layer is not None:
        a, b = a[adapter.layer], b[adapter.layer]
    return a.reshape(-1, rank).T, b.reshape(rank, -1).T


def _copy_into(params: Params, table: Params, adapter: _Adapter, part: str, array: np.ndarray) -> None:
    name = f"{adapter.name}_lora_{part.lower()}"
    tree, weights = params, table
    if adapter.layer is not None:
        tree, weights = params.setdefault("layers", {}), table["layers"]
    shape = weights[name].shape if adapter.layer is None else weights[name].shape[1:]
    rank = shape[-1] if part == "A" else shape[0]
    others = math.prod(shape) // rank
    if array.shape != ((rank, others) if part == "A" else (others, rank)):
        raise StoreError(f"{adapter.module}.lora_{part}: the shape {array.shape} does not match the model")
    value = array.astype(np.float32).T.reshape(shape)
    if adapter.layer is None:
        tree[name] = value
    else:
        tree.setdefault(name, np.zeros(weights[name].shape, np.float32))[adapter.layer] = value

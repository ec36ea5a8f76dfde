"""LoRA adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

Names and keys as of PEFT 0.18 (https://huggingface.co/docs/peft/developer_guides/checkpoint); those of all experts in
one tensor as of 0.21.
"""

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from conf.schema.training.layer_kinds import plain_name
from conf.schema.training.model import AnyModel, Lora, Model
from trainer.models.decoder_weights import INPUT_AXES, num_stacked
from trainer.models.weights import Params, select, weight_table
from trainer.pretrained import hf_files
from trainer.pretrained.hf_families import family_of
from trainer.pretrained.hf_tensors import packed_experts, tensor_mappings
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
    *("target_modules", "target_parameters", "exclude_modules", "layers_pattern"),  # the tensors say it
    *("lora_dropout", "eva_config", "loftq_config", "fan_in_fan_out", "ensure_weight_tying"),  # of training
    *("megatron_config", "megatron_core", "qalora_group_size"),  # of layers that are refused by other keys
)
"""Keys of adapter_config.json that are read or change no plain adapter. Others must be false or empty."""


class _Adapter(NamedTuple):
    """One adapted module of a layer in PEFT's file. layer: None outside of the layers.

    A fused module has the outputs of several of our matrices. Their adapters are written as one, whose A has the rows
    of all and whose B has blocks; one of PEFT's own, whose A serves all of them, is read as several.
    A module may have the matrices of all experts as a parameter: A has the rows of one expert after the other, B the
    columns of the first rank for all experts, then of the next.
    """

    module: str
    outputs: dict[str, int]  # by matrix
    adapted: tuple[str, ...]
    layer: tuple[int, ...] | None
    rows: np.ndarray  # which output each row of the module is, as they follow each other in `outputs`
    parameter: str = ""  # what PEFT targets, if it is one of all experts
    experts: int = 1  # in this module


def write_adapter(folder: epath.Path, params: Params, cfg: AnyModel) -> None:
    """Write the adapters of the weights, as NumPy reads them. Raises StoreError if there are none."""
    if not isinstance(cfg, Model) or cfg.lora is None:
        raise StoreError("model.lora: the weights have no adapters; use `--format hf`")
    tensors: dict[str, np.ndarray] = {}
    # PEFT 0.21 joins modules of each expert of Qwen 3 only; of others it would leave them out
    found, lora = list(_adapters(cfg, is_packed=family_of(cfg) != "qwen3_moe")), cfg.lora
    if any(len(adapter.layer or ()) > 1 for adapter in found):  # PEFT 0.21 joins gate and up without regard to rslora
        lora = lora.model_copy(update={"lora_alpha": lora.scale * lora.r, "use_rslora": False})
    arrays = jax.tree.map(np.asarray, select(params, weight_table(cfg), lambda weight: weight.trained))
    for adapter in found:
        for part, array in zip("AB", _to_peft(arrays, adapter, lora), strict=True):
            tensors[f"{PREFIX}{adapter.module}.lora_{part}.weight"] = np.ascontiguousarray(array, np.float32)
    config = PLAIN | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": cfg.weights,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "use_rslora": lora.use_rslora,
        "target_modules": sorted({adapter.module.rpartition(".")[2] for adapter in found if not adapter.parameter}),
        "lora_dropout": 0.0,
        "inference_mode": True,
        **_patterns(lora, found),
    }
    if parameters := sorted({adapter.parameter for adapter in found if adapter.parameter}):
        config["target_parameters"] = parameters
    folder.mkdir(parents=True, exist_ok=True)
    hf_files.write_safetensors(folder / WEIGHTS_FILE, tensors)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read_adapter(folder: epath.Path, cfg: Model) -> Params:
    """Return the adapters of PEFT's files, as NumPy arrays in the tree of `weight_table`.

    Raises StoreError: files are missing or damaged, or the adapter is not the one that `model.lora` describes.
    """
    assert cfg.lora is not None, "the caller has adapters"
    layouts = [list(_adapters(cfg, is_packed=is_packed)) for is_packed in (False, True)]
    _check_config(folder, cfg.lora, [_patterns(cfg.lora, adapters) for adapters in layouts])
    names = [{f"{PREFIX}{a.module}.lora_{part}.weight": (a, part) for a in own for part in "AB"} for own in layouts]
    wanted, table, params = names[0] | names[1], weight_table(cfg), dict[str, Any]()
    try:
        for key, array in hf_files.iter_file(folder / WEIGHTS_FILE):
            if key.endswith(".base_layer.weight"):
                continue  # PEFT saves the frozen output layer beside its adapter
            if key not in wanted:
                raise StoreError(f"{folder}: the tensor {key} is of no matrix of model.lora.target_modules")
            adapter, part = wanted.pop(key)
            _copy_into(params, table, adapter, part, array.astype(np.float32), cfg.lora.r)
    except hf_files.PretrainedError as error:
        raise StoreError(f"model.lora.adapter: {error}") from None
    if missing := min((wanted.keys() & own.keys() for own in names), key=len):
        raise StoreError(f"{folder}: {len(missing)} tensors are missing, such as {min(missing)}")
    return params


def _check_config(folder: epath.Path, lora: Lora, patterns: list[dict[str, Any]]) -> None:
    try:
        found = json.loads((folder / CONFIG_FILE).read_text())
        scale = found["lora_alpha"] / (found["r"] ** 0.5 if found.get("use_rslora") else found["r"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise StoreError(f"model.lora.adapter: {folder} has no valid {CONFIG_FILE} of PEFT") from None
    for key, value in (PLAIN | {"r": lora.r}).items():
        if found.get(key) != value:
            raise StoreError(f"model.lora: {key} is {found.get(key)!r} in {folder}, not {value!r}")
    if not math.isclose(scale, lora.scale):
        raise StoreError(f"model.lora.lora_alpha: adapters of {folder} are multiplied by {scale:g}, not {lora.scale:g}")
    if (start := found.get("init_lora_weights")) not in BASE_KEPT:
        raise StoreError(
            f"model.lora.adapter: {folder} has init_lora_weights {start!r}, which may have changed the base model; "
            "convert it to a plain LoRA with PEFT's path_initial_model_for_weight_conversion"
        )
    told = {key: found[key] for key in ("rank_pattern", "alpha_pattern") if found.get(key)}
    # as PEFT names them when it joins the experts' files
    patterns += [{key: {rf".*\.{name}": n for name, n in own.items()} for key, own in x.items()} for x in patterns]
    known = (*PLAIN, *KNOWN, *(told if told in patterns else ()))
    if key := next((key for key, value in found.items() if value and key not in known), None):
        raise StoreError(f"model.lora.adapter: {folder} uses {key}, which Slipway's adapters do not have")


def _patterns(lora: Lora, adapters: list[_Adapter]) -> dict[str, dict[str, float]]:
    """Return the keys of adapter_config.json for modules of another rank than r, all with the same scale."""
    times = {(a.parameter or a.module).rpartition(".")[2]: len(a.adapted) for a in adapters if len(a.adapted) > 1}
    alphas = {name: lora.lora_alpha * (n**0.5 if lora.use_rslora else n) for name, n in times.items()}
    return {"rank_pattern": {name: lora.r * n for name, n in times.items()}, "alpha_pattern": alphas} if times else {}


def _adapters(cfg: Model, *, is_packed: bool = False) -> Iterator[_Adapter]:
    """Yield the adapters of the model. Raises StoreError if PEFT has no place for one.

    is_packed: those of experts are of all in one, as transformers 5 computes with them, also if files have them apart.
    """
    table, packed = weight_table(cfg), packed_experts(cfg) if is_packed else ()
    named = {name.removesuffix("_lora_a") for name in (*table, *table["layers"]) if name.endswith("_lora_a")}
    for tensor in (*tensor_mappings(cfg), *packed):
        adapted = tuple(name for name in tensor.param_names if name in named)
        if not adapted or (packed and "{j}" in tensor.hf_name):
            continue
        if cfg.norm == "layer":
            raise StoreError("model.lora: GPT-2's adapters are not written for PEFT; use `--format hf`")
        module = tensor.hf_name.removesuffix(".weight")
        if not tensor.is_per_layer:
            outputs = {name: table[name].shape[0] for name in adapted}
            yield _Adapter(module, outputs, adapted, None, np.arange(sum(outputs.values())))
            continue
        parameter, count = "", 1
        if num_stacked(adapted[0]) > 1 and "{j}" not in tensor.hf_name:
            parameter, count = module.removeprefix("layers.{i}."), table["layers"][adapted[0]].shape[1]
        ends = {name: num_stacked(name) + INPUT_AXES[plain_name(name)] for name in tensor.param_names}
        shapes = {name: table["layers"][name].shape[end:] for name, end in ends.items()}
        outputs = {name: math.prod(shape) for name, shape in shapes.items()}
        numbers = np.split(np.arange(sum(outputs.values())), np.cumsum(list(outputs.values()))[:-1])
        ones = ((1,) * (INPUT_AXES[plain_name(name)] + bool(parameter)) for name in shapes)
        parts = zip(numbers, ones, shapes.values(), strict=True)
        rows = tensor.write(*(part.reshape(*one, *shape) for part, one, shape in parts)).reshape(-1)
        # PEFT wraps a module once for each parameter, and that of gate_up_proj in that of down_proj
        inner = ".base_layer" if "expert_down" in named.difference(adapted) else ""
        for name, place in tensor.places(cfg).items():
            path = f"model.{name.removesuffix('.weight')}"
            path = path.rpartition(".")[0] + inner if parameter else path
            yield _Adapter(path, outputs, adapted, place, rows, parameter, count)


def _to_peft(params: Params, adapter: _Adapter, lora: Lora) -> tuple[np.ndarray, np.ndarray]:
    """Return A [experts * r, inputs] and B [outputs, r * experts], with r of each adapted matrix."""
    tree = params if adapter.layer is None else params["layers"]
    rank, at, count = lora.r, adapter.layer or (), adapter.experts
    parts = [tree[f"{name}_lora_a"][at].reshape(count, -1, rank) for name in adapter.adapted]
    joined = np.concatenate(parts, axis=2).swapaxes(1, 2)
    blocks = np.zeros((count, len(adapter.rows), rank * len(adapter.adapted)), np.float32)
    for name, rows, columns in _places(adapter, rank):
        blocks[:, rows, columns] = tree[f"{name}_lora_b"][at].reshape(count, rank, -1).swapaxes(1, 2)
    written = blocks[:, adapter.rows].transpose(1, 2, 0)
    return joined.reshape(-1, joined.shape[2]), written.reshape(len(written), -1)


def _places(adapter: _Adapter, rank: int) -> Iterator[tuple[str, slice, slice]]:
    """Yield each adapted matrix with its rows and columns of B."""
    ends = dict(zip(adapter.outputs, np.cumsum(list(adapter.outputs.values())).tolist(), strict=True))
    for i, name in enumerate(adapter.adapted):
        yield name, slice(ends[name] - adapter.outputs[name], ends[name]), slice(rank * i, rank * (i + 1))


def _copy_into(params: Params, table: Params, adapter: _Adapter, part: str, array: np.ndarray, rank: int) -> None:
    """Copy what `_to_peft` returns of a module. Raises StoreError if it is of another shape, or no such."""
    at, weights = ((), table) if adapter.layer is None else (adapter.layer, table["layers"])
    shapes = {name: weights[f"{name}_lora_{part.lower()}"].shape for name in adapter.adapted}
    inputs = math.prod(next(iter(shapes.values()))[len(at) :]) // (rank * adapter.experts)
    ranks = (rank * adapter.experts, rank * adapter.experts * len(adapter.adapted))
    wide = [(r, inputs) if part == "A" else (len(adapter.rows), r) for r in ranks]
    where = f"{adapter.module}.lora_{part}"
    if array.shape not in wide:
        raise StoreError(f"{where}: the shape {array.shape} does not match the model")
    shared = array.shape == wide[0]
    if part == "A":
        array = array.reshape(adapter.experts, -1, inputs)
    else:
        array = array[np.argsort(adapter.rows)].reshape(len(adapter.rows), -1, adapter.experts).transpose(2, 0, 1)
    left = array.copy()
    tree = params if adapter.layer is None else params.setdefault("layers", {})
    for name, rows, columns in _places(adapter, rank):
        columns = slice(None) if shared else columns
        chosen = (slice(None), columns) if part == "A" else (slice(None), rows, columns)
        into = tree.setdefault(f"{name}_lora_{part.lower()}", np.zeros(shapes[name], np.float32))
        into[at] = array[chosen].swapaxes(1, 2).reshape(shapes[name][len(at) :])
        left[chosen] = 0
    if left.any():
        raise StoreError(
            f"{where}: it also adapts what model.lora.target_modules leaves out, or mixes {adapter.adapted}"
        )

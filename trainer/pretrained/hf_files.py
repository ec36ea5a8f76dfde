"""Read and write Hugging Face checkpoints tensor by tensor; only the result is ever held whole."""

import json
import math
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from conf.formats import RunFileError
from conf.hugging_face_base import UNQUANTIZED
from conf.schema.training.model import Model
from trainer.corpus import files
from trainer.models.weights import Params, weight_table
from trainer.pretrained import mxfp4
from trainer.pretrained.hf_tensors import (
    TensorMapping,
    packed_experts,
    quantized_names,
    tensor_mappings,
    tensors_without_use,
)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
NAME_PREFIXES = (
    "model.language_model.",  # a vision-language model of transformers 5
    "language_model.model.",  # and of transformers 4
    "language_model.",
    "model.",
    "transformer.",
    "",  # the bare decoder
)
"""Prefixes of the decoder's tensors."""
SKIPPED = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|vision_embedder|embed_vision)\..*"  # images are not read
    r"|(model\.)?visual\..*"
    r"|(model\.)?(audio_tower|embed_audio)\..*"  # nor is sound
    r"|mtp\..*"  # heads of later tokens
    r"|.*\.rotary_emb\.inv_freq"  # buffers, which config.json determines
    r"|.*\.attn\.(masked_)?bias"  # GPT-2's causal mask
)
"""Tensors of a checkpoint that the decoder does not have."""
HEAD, EMBEDDING = "lm_head.weight", "embedding"
"""The output layer's tensor, and the weight that it is in a model which ties both."""
READ_DTYPES = ("F64", "F32", "F16", "BF16")
SHARD_BYTES = 2 << 30
"""Maximum size of written files; writing needs this memory beside the largest weight of all layers."""
COPY_BYTES = 1 << 20
SAFETENSORS_TYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int8": "I8", "uint8": "U8",
}  # fmt: skip


class PretrainedError(RunFileError):
    """A checkpoint is incomplete, damaged, or of another model."""


def read_config(folder: epath.Path) -> dict[str, Any]:
    """Read config.json. Raises PretrainedError."""
    file = folder / "config.json"
    if not file.exists():
        raise PretrainedError(f"{folder}: config.json is missing; set the folder of a Hugging Face model")
    try:
        found = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PretrainedError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise PretrainedError(f"{file}: not a model's config: it is no mapping")
    return found


def read_params(folder: epath.Path, cfg: Model) -> Params:
    """Return all weights of the model as NumPy arrays in the checkpoint's dtypes, in the tree of `weight_table`.

    Where the layers of a weight have several dtypes, it has the one that holds them all. The head of a tied model is
    the embedding: it may be there twice, or under the head's name only, which transformers reads too.

    Raises:
        PretrainedError: a shard is missing or truncated, a tensor is missing, unknown, quantized or has another shape,
            or the output layer of a tied model has other values than its embedding.
    """
    wanted = {name: tensor for tensor in tensor_mappings(cfg) for name in tensor.places(cfg)}
    packed = {name: tensor for tensor in packed_experts(cfg) for name in tensor.places(cfg)}
    separate = {name for name in wanted if packed and ".experts." in name}
    wanted |= packed
    places = {name: place for tensor in dict.fromkeys(wanted.values()) for name, place in tensor.places(cfg).items()}
    quantized = {f"{name}{part}" for name in quantized_names(cfg) for part in mxfp4.PARTS}
    names, table, params = frozenset({*wanted, HEAD, *quantized}), weight_table(cfg), {}
    useless = tensors_without_use(cfg)
    head: np.ndarray | None = None

    def is_read(name: str) -> bool:
        if _decoder_name(name, names) is not None:
            return True
        if SKIPPED.fullmatch(name) or _decoder_name(name, useless) is not None:
            return False
        raise PretrainedError(f"{folder}: the tensor {name} is of no part of the model that config.json describes")

    for name, array in _dequantized(folder, iter_tensors(folder, is_read)):
        known = _decoder_name(name, names)
        if known == HEAD and cfg.tie_word_embeddings and head is None:
            head = array
            continue
        if known not in wanted:
            raise PretrainedError(f"{folder}: the tensor {name} is there twice, in two files or under two prefixes")
        _copy_into_params(params, table, known, wanted.pop(known), array, places[known])
    if head is not None:
        embedding = next(tensor for tensor in tensor_mappings(cfg) if tensor.param_names == (EMBEDDING,))
        if wanted.pop(embedding.hf_name, None):
            _copy_into_params(params, table, HEAD, embedding, head, ())
        elif not np.array_equal(*_with_one_dtype(head, params[EMBEDDING])):
            raise PretrainedError(
                f"{folder}: config.json ties {HEAD} to {embedding.hf_name}, and the two tensors differ; set "
                "tie_word_embeddings to false in a copy of the folder to train the model with both"
            )
    unused = packed.keys() if packed.keys() <= wanted.keys() else separate
    if not unused <= wanted.keys():
        raise PretrainedError(f"{folder}: has experts both separate and packed; remove one of the two")
    if missing := sorted(wanted.keys() - unused):
        raise PretrainedError(f"{folder}: {len(missing)} tensors are missing, such as {', '.join(missing[:3])}")
    return params


def _dequantized(folder: epath.Path, tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors, those of two parts as one under their common name."""
    waiting: dict[str, dict[str, np.ndarray]] = {}
    for name, array in tensors:
        part = next((part for part in mxfp4.PARTS if name.endswith(part)), None)
        if part is None:
            yield name, array
            continue
        whole = name.removesuffix(part)
        parts = waiting.setdefault(whole, {})
        parts[part] = array
        if len(parts) < len(mxfp4.PARTS):
            continue
        del waiting[whole]
        try:
            yield whole, mxfp4.dequantized(*(parts[part] for part in mxfp4.PARTS))
        except ValueError as error:
            raise PretrainedError(f"{folder}: {whole}: {error}") from None
    if waiting:
        raise PretrainedError(f"{folder}: {min(waiting)} has only one of {' and '.join(mxfp4.PARTS)}")


def _decoder_name(name: str, names: Collection[str]) -> str | None:
    """Return the name of a tensor inside the decoder, one of `names`; None if it is of something else."""
    bare = (name.removeprefix(prefix) for prefix in NAME_PREFIXES if name.startswith(prefix))
    return next((found for found in bare if found in names), None)


def write_params(
    folder: epath.Path, params: Params, cfg: Model, config: dict[str, Any], dtype: str | None = None
) -> None:
    """Write config.json and shards of at most SHARD_BYTES, readable by transformers' `from_pretrained`.

    params: arrays, or what `np.asarray` reads: each is read when its tensors are written, and released after them.
    dtype: of the written tensors; None keeps that of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = _plan_shards(params, cfg, dtype)
    where: dict[str, str] = {}
    tensors = _iter_hf_arrays(params, cfg, dtype)
    for i, count in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        arrays = dict(islice(tensors, count))
        write_safetensors(folder / file, arrays)
        where |= dict.fromkeys(arrays, file)
    if len(shards) > 1:
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": where}, indent=2) + "\n")
    if dtype is not None:
        config = config | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _plan_shards(params: Params, cfg: Model, dtype: str | None) -> list[int]:
    """Return how many tensors each shard has, in the order of `_iter_hf_arrays`."""
    shards, size = [0], 0
    for tensor in tensor_mappings(cfg):
        tree = params["layers"] if tensor.in_layers else params
        names = tensor.places(cfg)
        for _ in names:
            arrays = [tree[ours] for ours in tensor.param_names]
            items = (math.prod(x.shape) * (jnp.dtype(dtype) if dtype else x.dtype).itemsize for x in arrays)
            nbytes = sum(items) // len(names)
            if size + nbytes > SHARD_BYTES and shards[-1]:
                shards.append(0)
                size = 0
            shards[-1] += 1
            size += nbytes
    return shards


def _iter_hf_arrays(params: Params, cfg: Model, dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the array of every tensor; all layers of a weight follow each other, so it is read once."""
    for tensor in tensor_mappings(cfg):
        tree = params["layers"] if tensor.in_layers else params
        stacked = [np.asarray(tree[ours]) for ours in tensor.param_names]
        for name, place in tensor.places(cfg).items():
            array = tensor.write(*(part[place] for part in stacked))
            root = "" if name == "lm_head.weight" else "transformer." if cfg.norm == "layer" else "model."
            # a copy, because a view would keep all layers in memory
            yield f"{root}{name}", np.array(array, dtype=dtype and jnp.dtype(dtype), order="C")
        del stacked


def write_safetensors(file: epath.Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a safetensors file, array by array; the library would first copy them all.

    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        kind = SAFETENSORS_TYPES[array.dtype.name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, end]}
    packed = json.dumps(header, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % 8)  # aligns the arrays
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(packed)) + packed)
        for array in arrays.values():
            out.write(array.reshape(-1).view(np.uint8).data)


def _copy_into_params(
    params: Params, table: Params, name: str, tensor: TensorMapping, array: np.ndarray, place: tuple[int, ...]
) -> None:
    """Copy a tensor to its place; the first tensor of a weight allocates its array of all layers."""
    try:
        parts = tensor.read(array)
    except (ValueError, IndexError):
        parts = ()
    tree = table["layers"] if tensor.in_layers else table
    shapes = [tree[ours].shape[len(place) :] for ours in tensor.param_names]
    if [part.shape for part in parts] != shapes or tensor.write(*parts).shape != array.shape:
        raise PretrainedError(f"{name}: the shape {array.shape} does not match config.json")
    for ours, part in zip(tensor.param_names, parts, strict=True):
        layers = params.setdefault("layers", {}) if tensor.in_layers else params
        if not tensor.is_per_layer:
            layers[ours] = np.ascontiguousarray(part)
            continue
        if ours not in layers:
            layers[ours] = np.zeros(table["layers"][ours].shape, part.dtype)
        layers[ours], part = _with_one_dtype(layers[ours], part)
        layers[ours][place] = part


def _with_one_dtype(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both in the dtype that holds either; NumPy has none for bfloat16 and float16."""
    dtype = jnp.promote_types(one.dtype, other.dtype)
    return one.astype(dtype, copy=False), other.astype(dtype, copy=False)


def iter_tensors(
    folder: epath.Path, is_read: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and value of every tensor that `is_read`, one at a time. Raises PretrainedError."""
    for name in _shards(folder):
        yield from iter_file(folder / name, is_read)


def iter_file(file: epath.Path, is_read: Callable[[str], bool] = lambda _: True) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and value of every tensor of a safetensors file that `is_read`. Raises PretrainedError."""
    if not file.exists():
        raise PretrainedError(f"{file}: the shard is missing; download the model again")
    with _local_copy(file) as path:
        try:
            with safe_open(path, framework="np") as shard:
                for key in shard.keys():  # noqa: SIM118 - it is no dict
                    if not is_read(key):
                        continue
                    dtype = shard.get_slice(key).get_dtype()
                    if dtype not in READ_DTYPES and not (dtype == "U8" and key.endswith(mxfp4.PARTS)):
                        raise PretrainedError(f"{file}: {key} has type {dtype}: {UNQUANTIZED}")
                    yield key, shard.get_tensor(key)
        except SafetensorError as error:
            raise PretrainedError(f"{file}: is damaged or incomplete ({error}); download it again") from None


def _shards(folder: epath.Path) -> list[str]:
    is_whole = (folder / SINGLE_FILE).exists()
    if not (folder / INDEX_FILE).exists():
        if is_whole:
            return [SINGLE_FILE]
        raise PretrainedError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        places = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        names = sorted({Path(name).as_posix() for name in places.values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PretrainedError(f"{folder / INDEX_FILE}: not an index of shards; download it again") from None
    if not is_whole or SINGLE_FILE in names:
        return names
    if there := [name for name in names if (folder / name).exists()]:
        raise PretrainedError(f"{folder}: has {SINGLE_FILE} and {there[0]}; remove what is not this model's")
    return [SINGLE_FILE]  # the index is of an earlier form of the model, as transformers takes it


@contextmanager
def _local_copy(file: epath.Path) -> Iterator[Path]:
    """Yield a local path to the file: itself, or a copy that is deleted afterwards."""
    if "://" not in str(file):
        yield Path(file)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        with files.open_file(file) as source, copy.open("wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)
        yield copy

"""Stored weights to start from: an Orbax checkpoint with model.yaml, or a Hugging Face folder."""

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml
from etils import epath
from jax.sharding import Mesh
from pydantic import ValidationError

from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFileError
from trainer.models.weights import Params, abstract_params, param_shardings
from trainer.pretrained import hf_families, hf_files

WEIGHTS_FOLDER = "weights"
DESCRIPTION_FILE = "model.yaml"
COMPUTE_KEYS = {
    "activation_dtype",
    "attention",
    "scan_layers",
    "remat",
    "logit_chunk",
    "init",
    "max_seq_len",
    "weights",
    "config_json",
}
"""Model keys that may differ between the writer and the reader of the weights."""


class StoreError(RunFileError):
    """The folder has no weights, or those of another model."""


def write_params(folder: epath.Path, params: Params, cfg: Model) -> None:
    """Write the weights, NumPy arrays, then their description; a folder without one is incomplete."""
    # the usual handler makes a copy of every array first, so that it may be changed meanwhile; nobody does that here
    handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, handler))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        checkpointer.save(_absolute(folder) / WEIGHTS_FOLDER, params)
    (folder / DESCRIPTION_FILE).write_text(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))


def read_model(folder: epath.Path) -> Model:
    """Return the model of the stored weights. Raises StoreError."""
    file = folder / DESCRIPTION_FILE
    if not file.exists() and (folder / "config.json").exists():
        try:
            return hf_families.model_from_config(hf_files.read_config(folder))
        except (hf_files.PretrainedError, hf_families.UnknownArchitectureError) as error:
            raise StoreError(f"{folder}: {error}") from None
    if not file.exists():
        raise StoreError(f"{folder}: {DESCRIPTION_FILE} is missing; create it with `python -m trainer.convert import`")
    try:
        return Model.model_validate(yaml.safe_load(file.read_text()))
    except ValidationError as error:
        raise StoreError(f"{file}: {error.errors()[0]['msg']}") from None


def read_params(folder: epath.Path, cfg: Model) -> Params:
    """Return the weights as NumPy arrays in their stored dtypes. Raises StoreError."""
    _check_same_model(folder, cfg)
    with ocp.PyTreeCheckpointer() as checkpointer:
        return jax.tree.map(np.asarray, checkpointer.restore(_absolute(folder) / WEIGHTS_FOLDER))


def load_sharded(folder: epath.Path, cfg: Model, mesh: Mesh) -> Params:
    """Load the weights onto the mesh, in the model's dtypes.

    From our own folders, each process reads only its devices' shards; from Hugging Face's, everything, into its memory.
    Raises StoreError.
    """
    _check_same_model(folder, cfg)
    wanted = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        abstract_params(cfg),
        param_shardings(cfg, mesh),
    )
    if not (folder / DESCRIPTION_FILE).exists():
        read, shapes = _read_pretrained(folder, cfg), jax.tree.leaves(wanted)
        arrays, tree = jax.tree.flatten(read)
        del read  # frees each array once it is placed
        return tree.unflatten([_to_sharded_array(arrays.pop(0), shape) for shape in shapes])
    restore: Any = ocp.checkpoint_utils.construct_restore_args(wanted)
    with ocp.PyTreeCheckpointer() as checkpointer:
        placed = checkpointer.restore(_absolute(folder) / WEIGHTS_FOLDER, restore_args=restore)
    return jax.tree.map(lambda x, w: x.astype(w.dtype) if x.dtype != w.dtype else x, placed, wanted)


def _read_pretrained(folder: epath.Path, cfg: Model) -> Params:
    try:
        return hf_files.read_params(folder, cfg)
    except hf_files.PretrainedError as error:
        raise StoreError(f"model.weights: {error}") from None


def _to_sharded_array(array: np.ndarray, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    def part(index: tuple[slice, ...]) -> np.ndarray:
        return array[index].astype(wanted.dtype, copy=False)

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, part)  # pyright: ignore[reportArgumentType]


def _check_same_model(folder: epath.Path, cfg: Model) -> None:
    """Raise StoreError unless the weights are of this model."""
    found, wanted = read_model(folder).model_dump(), cfg.model_dump()
    for key in wanted.keys() - COMPUTE_KEYS:
        if found[key] != wanted[key]:
            raise StoreError(f"model.{key}: is {wanted[key]!r}, but {found[key]!r} in the weights of {folder}")


def _absolute(folder: epath.Path) -> epath.Path:
    """Return the absolute path; Orbax rejects relative ones."""
    return folder if "://" in str(folder) else folder.resolve()

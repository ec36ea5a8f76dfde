"""Stored weights to start from: a folder with model.yaml, a Hugging Face folder, or a checkpoint of a run."""

from functools import partial
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml
from etils import epath
from jax.sharding import Mesh
from pydantic import ValidationError

from conf.schema.training.model import AnyModel, Model, different_weights, read_model_section
from trainer.distributed.checksums import ReplicaChecksums, bit_sum, named_leaves
from trainer.distributed.mesh import with_shardings
from trainer.models.decoder_weights import merged_weight
from trainer.models.weights import Params, abstract_params, overlay, param_shardings, select
from trainer.pretrained import hf_families, hf_files, peft_files, run_weights
from trainer.pretrained.integrity import altered, check_database, read_checksums, write_checksums
from trainer.pretrained.run_weights import StoreError

WEIGHTS_FOLDER = "weights"
DESCRIPTION_FILE = "model.yaml"
CHECKSUMS_FILE = "checksums.json"


def write_params(folder: epath.Path, params: Params, cfg: AnyModel) -> None:
    """Write the checksums of the weights, the weights, NumPy arrays, and last their description.

    A folder without a description is incomplete.
    """
    write_checksums(folder / CHECKSUMS_FILE, {name: bit_sum(array) for name, array in named_leaves(params).items()})
    # the usual handler makes a copy of every array first, so that it may be changed meanwhile; nobody does that here
    handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, handler))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        checkpointer.save(_absolute(folder) / WEIGHTS_FOLDER, params)
    (folder / DESCRIPTION_FILE).write_text(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))


def read_model(folder: epath.Path, wanted: AnyModel | None = None) -> AnyModel:
    """Return the model of the stored weights. Raises StoreError.

    wanted: the model of the run. If it has a `config_json`, that one describes it, and unknown fields of the
    config.json beside the weights are left out.
    """
    file = folder / DESCRIPTION_FILE
    if run_weights.is_checkpoint(folder):
        return run_weights.read_model(_absolute(folder))
    if not file.exists() and (folder / "config.json").exists():
        try:
            config = hf_files.read_config(folder)
            if isinstance(wanted, Model) and wanted.config_json is not None:
                config = hf_families.without_unknown_fields(config)
            return hf_families.model_from_config(config)
        except (hf_files.PretrainedError, hf_families.UnknownArchitectureError) as error:
            raise StoreError(f"{folder}: {error}") from None
    if not file.exists():
        raise StoreError(f"{folder}: {_absence(folder)}")
    try:
        return read_model_section(yaml.safe_load(file.read_text()))
    except ValidationError as error:
        raise StoreError(f"{file}: {error.errors()[0]['msg']}") from None


def _absence(folder: epath.Path) -> str:
    """Return why a folder has no weights, and what to do."""
    if not folder.exists():
        return "there is no such folder"
    run = folder.parent if folder.name == run_weights.CHECKPOINTS_FOLDER else folder
    if steps := run_weights.checkpoint_steps(run):
        names = ", ".join(map(str, steps))
        return f"it has checkpoints of a run; choose one: {run / run_weights.CHECKPOINTS_FOLDER}/STEP, of {names}"
    return (
        f"it has neither config.json nor {DESCRIPTION_FILE}, and is no checkpoint of a run; give a folder from Hugging "
        "Face, from `slipway export` or from `python -m trainer.convert import`"
    )


def merged(params: Params, cfg: Model) -> Params:
    """Return the weights, as NumPy reads them, with the adapters of `model.lora` merged into their matrices."""
    if cfg.lora is None:
        return params
    found: Params = {}
    for name, value in params.items():
        if isinstance(value, dict):
            found[name] = merged(value, cfg)
        elif f"{name}_lora_a" in params:
            read = partial(merged_weight, params, name, cfg)
            found[name] = run_weights.StoredArray(tuple(value.shape), np.dtype(np.float32), read)
        elif not name.endswith(("_lora_a", "_lora_b")):
            found[name] = value
    return found


def read_params(folder: epath.Path, cfg: AnyModel) -> Params:
    """Return the weights as arrays in their stored dtypes; those of a checkpoint are read later. Raises StoreError."""
    _check_same_model(folder, cfg)
    if run_weights.is_checkpoint(folder):
        return run_weights.read_params(_absolute(folder), cfg)
    if not (folder / DESCRIPTION_FILE).exists():
        return _read_pretrained(folder, cfg)
    params = jax.tree.map(np.asarray, _restore(folder))
    _check_unaltered(folder, {name: bit_sum(array) for name, array in named_leaves(params).items()})
    return params


def load_sharded(folder: epath.Path, cfg: AnyModel, mesh: Mesh) -> Params:
    """Load the weights onto the mesh, in the model's dtypes.

    Adapters of `model.lora` come from `model.lora.adapter`, else from the folder; if neither has any, they are left
    out. From our own folders and checkpoints, each process reads only its devices' shards; from Hugging Face's,
    everything, into its memory.
    Raises StoreError.
    """
    _check_same_model(folder, cfg)
    wanted = with_shardings(abstract_params(cfg), param_shardings(cfg, mesh))
    if isinstance(cfg, Model) and cfg.lora is not None:
        found, given = read_model(folder, cfg), dict[str, Any]()
        if cfg.lora.adapter is not None:
            read = peft_files.read_adapter(epath.Path(cfg.lora.adapter), cfg)
            given = jax.tree.map(_to_sharded_array, read, select(wanted, read))
        if cfg.lora.adapter is not None or (isinstance(found, Model) and found.lora is None):
            bare = cfg.model_copy(update={"lora": found.lora if isinstance(found, Model) else None})
            return overlay(_load(folder, bare, select(wanted, abstract_params(bare))), given)
    return _load(folder, cfg, wanted)


def _load(folder: epath.Path, cfg: AnyModel, wanted: Params) -> Params:
    """Load weights into arrays of the given shapes, dtypes and shardings. Raises StoreError."""
    if run_weights.is_checkpoint(folder):
        return run_weights.load_sharded(_absolute(folder), wanted, cfg)
    if not (folder / DESCRIPTION_FILE).exists():
        read, shapes = _read_pretrained(folder, cfg), jax.tree.leaves(wanted)
        arrays, tree = jax.tree.flatten(read)
        del read  # frees each array once it is placed
        return tree.unflatten([_to_sharded_array(arrays.pop(0), shape) for shape in shapes])
    placed = _restore(folder, wanted)
    _check_unaltered(folder, ReplicaChecksums().compute(placed, "as read from model.weights"))
    return jax.tree.map(lambda x, w: x.astype(w.dtype), placed, wanted)


def _restore(folder: epath.Path, wanted: Params | None = None) -> Params:
    """Return the arrays of a folder of our own as NumPy's, or with the shardings of `wanted`; dtypes are the stored.

    Raises StoreError if files are missing or damaged.
    """
    weights, how = _absolute(folder) / WEIGHTS_FOLDER, dict[str, Any]()
    with run_weights.damage_named(folder, "the copy of the weights"):
        check_database(weights)
        if wanted is not None:
            saved = ocp.PyTreeCheckpointHandler().metadata(weights).tree
            stored = jax.tree.map(
                lambda w, s: jax.ShapeDtypeStruct(w.shape, s.dtype, sharding=w.sharding), wanted, saved
            )
            how = {"restore_args": ocp.checkpoint_utils.construct_restore_args(stored)}
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(weights, **how)


def _check_unaltered(folder: epath.Path, checksums: dict[str, int]) -> None:
    if name := altered(checksums, read_checksums(folder / CHECKSUMS_FILE)):
        raise StoreError(f"{folder}: {name} differs from what was saved; export or import the weights again")


def _read_pretrained(folder: epath.Path, cfg: AnyModel) -> Params:
    assert isinstance(cfg, Model), "a folder from Hugging Face describes a decoder, and its kind has been compared"
    try:
        return hf_files.read_params(folder, cfg)
    except hf_files.PretrainedError as error:
        raise StoreError(f"model.weights: {error}") from None


def _to_sharded_array(array: np.ndarray, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    def part(index: tuple[slice, ...]) -> np.ndarray:
        return array[index].astype(wanted.dtype, copy=False)

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, part)  # pyright: ignore[reportArgumentType]


def check_weights(cfg: AnyModel) -> None:
    """Raise StoreError unless `model.weights` is null or names weights of this model. Reads only descriptions."""
    if cfg.weights is not None:
        _check_same_model(epath.Path(cfg.weights), cfg)


def _check_same_model(folder: epath.Path, cfg: AnyModel) -> None:
    """Raise StoreError unless the weights are of this model."""
    found, wanted = read_model(folder, cfg), cfg
    if key := different_weights(found, wanted):
        wish, there = getattr(wanted, key), getattr(found, key)
        raise StoreError(f"model.{key}: is {wish!r}, but {there!r} in the weights of {folder}")


def _absolute(folder: epath.Path) -> epath.Path:
    """Return the absolute path; Orbax rejects relative ones."""
    return folder if "://" in str(folder) else folder.resolve()

"""The weights in a checkpoint of a run, RUN/checkpoints/STEP; RUN/run.yaml says of which model they are.

If the run averages its weights (`optimizer.ema_decay`), the average is read: it is what the run evaluated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml
from etils import epath
from pydantic import ValidationError

from conf.formats import RunFileError
from conf.schema.training import run_yaml
from conf.schema.training.model import AnyModel, read_model_section
from conf.schema.training.run_yaml import RunFile
from trainer.distributed.checksums import ReplicaChecksums, bit_sum, leaf_path, named_leaves
from trainer.models.weights import Params, overlay, select, weight_table
from trainer.pretrained.integrity import OUTAGE_PATTERN, altered, check_database

CHECKPOINTS_FOLDER = "checkpoints"
RUN_FILE = "run.yaml"


class StoreError(RunFileError):
    """The folder has no weights, or those of another model."""


@contextmanager
def damage_named(folder: epath.Path, what: str) -> Iterator[None]:
    """Turn what the libraries raise of a missing or damaged file into a StoreError of one line; not an outage."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        if isinstance(error, (ConnectionError, TimeoutError)) or OUTAGE_PATTERN.search(str(error)):
            raise
        problem = " ".join(str(error).split())[:300]
        raise StoreError(f"{folder}: {what} is incomplete or damaged: {problem}; use another one") from None


def is_checkpoint(folder: epath.Path) -> bool:
    """Return whether the folder is a checkpoint of a run, complete or not."""
    return folder.parent.name == CHECKPOINTS_FOLDER and folder.name.isdigit() and folder.exists()


def checkpoint_steps(run: epath.Path) -> list[int]:
    """Return the steps of a run's checkpoints, in order; none if the folder is no run's."""
    folder = run / CHECKPOINTS_FOLDER
    if not folder.exists():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def run_file(folder: epath.Path) -> epath.Path:
    """Return the run.yaml of a checkpoint's run, or the one that `export` puts beside weights; it may not exist."""
    return (folder.parent.parent if is_checkpoint(folder) else folder) / RUN_FILE


def read_experiment(folder: epath.Path) -> RunFile | None:
    """Return the run that made the weights of a folder, if the folder says so. Raises RunFileError."""
    file = run_file(folder)
    return run_yaml.load(cast(Any, file)) if file.exists() else None


def read_model(folder: epath.Path) -> AnyModel:
    """Return the model of a checkpoint. Raises StoreError."""
    file = run_file(folder)
    if not file.exists():
        raise StoreError(f"{folder}: {file} is missing, which says of what model it is; copy it from the run's folder")
    try:
        return read_model_section(yaml.safe_load(file.read_text())["model"])
    except (yaml.YAMLError, KeyError, TypeError):
        raise StoreError(f"{file}: not the run.yaml of a run of the bundled trainer") from None
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(map(str, ("model", *found["loc"][1:])))  # the first part is the kind
        raise StoreError(f"{file}: {key}: {found['msg']}; was it written by another version of Slipway?") from None


class StoredArray:
    """An array of a checkpoint, which is read, and compared with its checksum, when NumPy asks for it."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], read: Callable[[], np.ndarray]) -> None:
        self.shape, self.dtype, self._read = shape, dtype, read

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._read()
        return array if dtype is None else array.astype(dtype, copy=False)


def read_params(folder: epath.Path, cfg: AnyModel) -> Params:
    """Return the weights as `StoredArray`s, in the tree of `weight_table`. Raises StoreError."""
    roots, saved = _saved_weights(folder, cfg)
    checksums = _checksums(folder)

    def stored(path: Any, root: str, entry: Any) -> StoredArray:
        names = [root, *(key.key for key in path)]

        def read() -> np.ndarray:
            with damage_named(folder, "the checkpoint"):
                array = _read_leaf(folder, names)
            if altered({".".join(names): bit_sum(array)}, checksums):
                raise StoreError(f"{folder}: {'.'.join(names)} differs from what was saved; use another checkpoint")
            return array

        return StoredArray(tuple(entry.shape), np.dtype(entry.dtype), read)

    return jax.tree.map_with_path(stored, roots, saved)


def load_sharded(folder: epath.Path, wanted: Params, cfg: AnyModel) -> Params:
    """Read the weights into arrays of the given shapes, dtypes and shardings; each process reads only its shards.

    Raises:
        StoreError: the checkpoint is damaged or of another model.
    """
    roots, saved = _saved_weights(folder, cfg)
    stored = jax.tree.map(lambda w, s: jax.ShapeDtypeStruct(w.shape, s.dtype, sharding=w.sharding), wanted, saved)
    names = sorted({*jax.tree.leaves(roots)})
    items = {name: select(stored, roots, lambda root, name=name: root == name) for name in names}
    with damage_named(folder, "the checkpoint"), ocp.PyTreeCheckpointer() as checkpointer:
        args = ocp.args.PyTreeRestore(
            items, restore_args=ocp.checkpoint_utils.construct_restore_args(items), partial_restore=True
        )
        found = checkpointer.restore(folder / "state", args=args)
    read = {root: found[root] for root in items}
    if name := altered(ReplicaChecksums().compute(read, "as read from model.weights"), _checksums(folder)):
        raise StoreError(f"model.weights: {folder}: {name} differs from what was saved; use another checkpoint")
    whole = overlay(read["params"], read["average"]) if len(read) == 2 else next(iter(read.values()))
    return jax.tree.map(lambda x, w: x.astype(w.dtype), whole, wanted)


def _saved_weights(folder: epath.Path, cfg: AnyModel) -> tuple[Params, Params]:
    """Return for each weight its root in a checkpoint's state, and its metadata, after comparing the shapes.

    The root is `average` where the run averages the weight, else `params`.
    """
    with damage_named(folder, "the checkpoint"):
        check_database(folder / "state")
        tree = ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree
    kept = {root: named_leaves(tree.get(root) or {}) for root in ("params", "average")}
    saved, wanted = kept["params"] | kept["average"], named_leaves(weight_table(cfg))
    for name in sorted(saved.keys() | wanted.keys()):
        shapes = [tuple(tree[name].shape) if name in tree else "absent" for tree in (saved, wanted)]
        if shapes[0] != shapes[1]:
            raise StoreError(f"{folder}: {name} is {shapes[0]} in the checkpoint, but {shapes[1]} in the model")
    table = weight_table(cfg)
    roots = jax.tree.map_with_path(lambda path, _: "average" if leaf_path(path) in kept["average"] else "params", table)
    return roots, jax.tree.map_with_path(lambda path, _: saved[leaf_path(path)], table)


def _checksums(folder: epath.Path) -> dict[str, int]:
    with damage_named(folder, "the checkpoint"):
        return dict(ocp.JsonCheckpointHandler().restore(folder / "position")["checksums"])


def _read_leaf(folder: epath.Path, names: list[str]) -> np.ndarray:
    item: Any = ocp.RestoreArgs(restore_type=np.ndarray)
    for name in reversed(names):
        item = {name: item}
    args = ocp.args.PyTreeRestore(item, restore_args=item, partial_restore=True)
    found: Any = ocp.PyTreeCheckpointHandler().restore(folder / "state", args=args)
    for name in names:
        found = found[name]
    return np.asarray(found)

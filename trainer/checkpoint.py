"""Checkpoints through Orbax: written in the background, complete or not there at all, on local folders and gs://."""

from __future__ import annotations

from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from conf.runfile import RunFileError
from trainer.weights import Params

SMALLEST_SLICE_BYTES = 1 << 20


class Checkpoints:
    """The checkpoints of a run: DIR/checkpoints/<step>/, and DIR/reference/, the frozen policy, saved once.

    All processes call every method, in the same order.
    """

    def __init__(self, folder: str, keep: int) -> None:
        root = epath.Path(folder)
        if not folder.startswith("gs://"):
            root = root.resolve()
        self._reference = root / "reference"
        self._manager = ocp.CheckpointManager(
            root / "checkpoints",
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
            item_handlers={"state": _arrays(), "position": ocp.JsonCheckpointHandler()},
        )

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None: there is none. A half-written one does not count."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Save a pytree of arrays, and what else tells where the loop is (JSON), after `step` updates.

        Returns once the arrays are copied; the files are written meanwhile. An earlier save is waited for.
        """
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), position=ocp.args.JsonSave(position))
        self._manager.save(step, args=items, force=True)

    def restore(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """State and position saved at `step`. abstract: shapes, types and shardings, as of `update.abstract_state`.

        Raises RunFileError where the checkpoint is of another model or optimizer.
        """
        self._manager.wait_until_finished()
        saved = _shapes(self._manager.item_metadata(step)["state"].tree)
        for name, wanted in _shapes(abstract).items():
            if saved.get(name) != wanted:
                raise RunFileError(
                    f"dir: {name} is {saved.get(name, 'absent')} in the checkpoint of step {step}, but {wanted} by the "
                    "config; resume with the model and optimizer that the run began with, or take another dir"
                )
        items = ocp.args.Composite(state=_into(abstract), position=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        return restored["state"], restored["position"]

    def save_reference(self, params: Params) -> None:
        """Save the frozen policy, unless it is there. Returns when it is complete."""
        if not self._reference.exists():
            with ocp.Checkpointer(_arrays()) as checkpointer:
                checkpointer.save(self._reference, args=ocp.args.PyTreeSave(params))

    def restore_reference(self, abstract: Params) -> Params:
        """The frozen policy, as saved. abstract: shapes, types and shardings of the weights."""
        with ocp.Checkpointer(_arrays()) as checkpointer:
            return checkpointer.restore(self._reference, args=_into(abstract))

    def close(self) -> None:
        """Wait until everything is written. Raises what the writing raised."""
        self._manager.wait_until_finished()
        self._manager.close()


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}


def _arrays() -> ocp.PyTreeCheckpointHandler:
    """Devices that hold the same array share its writing, where it is large: each new slice costs a compilation."""
    handler = type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SMALLEST_SLICE_BYTES)
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=type_handlers.create_type_handler_registry((jax.Array, handler))
    )


def _into(abstract: Any) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))

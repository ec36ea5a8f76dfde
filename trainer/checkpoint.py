"""Checkpoints through Orbax: written in the background, complete or not there at all, on local folders and gs://."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from trainer.model import Params


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
            item_names=("state", "position"),
        )

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None: there is none. A half-written one does not count."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Save a pytree of arrays, and what else tells where the loop is (JSON), after `step` updates.

        Returns once the arrays are copied; the files are written meanwhile. An earlier save is waited for.
        """
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position))
        self._manager.save(step, args=items, force=True)

    def restore(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """State and position saved at `step`. abstract: shapes, types and shardings, as of `update.abstract_state`."""
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), position=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        return restored["state"], restored["position"]

    def save_reference(self, params: Params) -> None:
        """Save the frozen policy, unless it is there. Returns when it is complete."""
        if not self._reference.exists():
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(self._reference, params)

    def restore_reference(self, abstract: Params) -> Params:
        """The frozen policy, as saved."""
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(self._reference, abstract)

    def close(self) -> None:
        """Wait until everything is written. Raises what the writing raised."""
        self._manager.wait_until_finished()
        self._manager.close()

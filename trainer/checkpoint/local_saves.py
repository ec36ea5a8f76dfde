"""Checkpoints on the workers' disks while the bucket does not answer, and their upload afterwards.

Each worker keeps the files that it would have written to the bucket: `STEP/state/ocdbt.process_N`, and on worker 0 the
metadata and the loop's position too. A step counts once all workers have it. The upload puts the files together under
the run's folder; the commit file comes last, so a checkpoint in the bucket is whole or does not count.
"""

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import fsspec
import jax
import orbax.checkpoint as ocp
from etils import epath

from trainer.checkpoint.storage import RunStorage, array_handler, first_line, outage_of
from trainer.distributed.runtime import gather_texts

PARTIAL = ".partial"
SUCCESS_FILE = "commit_success.txt"
"""Orbax's mark of a complete checkpoint in a bucket; without it the files do not count."""
MIN_FREE_BYTES = 2**30
"""Free disk that a local checkpoint leaves for the rest of the worker."""
MARGIN = 1.1
"""Bytes of a worker's files as a multiple of its arrays: metadata, chunks that do not compress."""
NUM_UPLOADS = 8
"""Files of a worker that are uploaded at the same time."""


class Outputs(Protocol):
    """What a run writes besides checkpoints."""

    storage: RunStorage

    @property
    def local(self) -> Path:
        """The folder of this worker."""
        ...

    def upload(self) -> Future[None]:
        """Begin to copy metrics to the run's folder; a checkpoint without its metrics could not be resumed."""
        ...


class NoRoomError(Exception):
    """A worker's disk is too small for a local checkpoint. All processes raise it together."""


class LocalSaves:
    """Local checkpoints of one run. All processes call every method but `discard`, in the same order."""

    def __init__(self, folder: Path, remote: epath.Path) -> None:
        """Prepare; nothing is written yet.

        Args:
            folder: on this worker's disk.
            remote: the run's folder of checkpoints.
        """
        self.folder, self._remote = folder, remote
        self._process = jax.process_index()

    def steps(self) -> list[int]:
        """Return the steps that all workers have, in order; what only some have is dropped."""
        mine = sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())
        everyone = [set(json.loads(text)) for text in gather_texts(json.dumps(mine))]
        whole = sorted(set.intersection(*everyone))
        for step in set(mine) - set(whole):
            lacking = [worker for worker, steps in enumerate(everyone) if step not in steps]
            logging.warning("the local checkpoint of step %d is incomplete: worker %s lacks it", step, lacking)
            self.discard(step)
        for path in self.folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(path)
        return whole

    def save(self, step: int, state: Any, content: dict[str, Any]) -> None:
        """Save on every worker's disk; returns when all have. content: JSON of `position`.

        Raises:
            NoRoomError: a disk is too small; nothing of this step is left.
        """
        if problems := gather_problems(self._room_problem(state) or self._write(step, state, content)):
            self.discard(step)
            raise NoRoomError("; ".join(problems))
        (self.folder / f"{step}{PARTIAL}").rename(self.folder / str(step))

    def discard(self, step: int) -> None:
        """Delete this worker's files of a step."""
        for name in (str(step), f"{step}{PARTIAL}"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def upload(self, step: int) -> str:
        """Copy a step to the run's folder and complete it there; return the problem, empty if there is none."""
        final, target = self._remote / str(step), self._remote_draft(step)
        if problem := self._together(lambda: self._prepare(final, target) if self._process == 0 else None):
            return problem
        if problem := self._together(lambda: self._copy(step, target)):
            return problem
        if problem := self._together(lambda: self._commit(step, target, final) if self._process == 0 else None):
            return problem
        self.discard(step)
        return ""

    def _room_problem(self, state: Any) -> str:
        """Return what is missing on this worker's disk for a checkpoint, empty if nothing is."""
        needed = int(MARGIN * local_bytes(state))
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free - needed >= MIN_FREE_BYTES:
            return ""
        return (
            f"{self.folder} has {free / 1e9:.1f} GB free; a checkpoint takes {needed / 1e9:.1f} GB, and "
            f"{MIN_FREE_BYTES / 1e9:.1f} GB must stay free"
        )

    def _write(self, step: int, state: Any, content: dict[str, Any]) -> str:
        draft = epath.Path(self.folder) / f"{step}{PARTIAL}"
        self.discard(step)
        try:
            (draft / "state").mkdir(parents=True)
            with jax.transfer_guard("allow"):
                array_handler().save(draft / "state", args=ocp.args.PyTreeSave(state))
            if self._process == 0:
                (draft / "position").mkdir()
                (draft / "position" / "metadata").write_text(json.dumps(content))
        except (OSError, ValueError) as error:  # a full disk is an OSError here and a ValueError in TensorStore
            return f"cannot write to {self.folder}: {first_line(error)}"
        return ""

    def _together(self, act: Callable[[], None]) -> str:
        """Act on every worker, and return the first problem of any."""
        return next(iter(gather_problems(outage_of(act))), "")

    def _remote_draft(self, step: int) -> epath.Path:
        """Return where the files are put together: in a bucket the commit file completes them, elsewhere a rename."""
        in_bucket = str(self._remote).startswith("gs://")
        return self._remote / (str(step) if in_bucket else f"{step}.orbax-checkpoint-tmp-outage")

    def _prepare(self, final: epath.Path, target: epath.Path) -> None:
        """Make room for the files: an incomplete checkpoint of this step may be there."""
        for place in {final, target}:
            if place.exists():
                place.rmtree()
        (target / "state").mkdir(parents=True, exist_ok=True)

    def _copy(self, step: int, target: epath.Path) -> None:
        source = self.folder / str(step)
        files, there = fsspec.core.url_to_fs(str(target))
        found = [path for path in sorted(source.rglob("*")) if path.is_file()]
        for folder in {path.parent for path in found}:
            (target / folder.relative_to(source)).mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(NUM_UPLOADS) as pool:
            list(pool.map(lambda path: files.put_file(str(path), f"{there}/{path.relative_to(source)}"), found))

    def _commit(self, step: int, target: epath.Path, final: epath.Path) -> None:
        began, handler = time.time_ns(), array_handler()
        handler.finalize(target / "state")
        kinds = {"state": ocp.PyTreeCheckpointHandler, "position": ocp.JsonCheckpointHandler}
        about = {"item_handlers": {name: f"{kind.__module__}.{kind.__qualname__}" for name, kind in kinds.items()}}
        about |= {"metrics": {}, "performance_metrics": {}, "custom_metadata": {}}
        about |= {"init_timestamp_nsecs": began, "commit_timestamp_nsecs": time.time_ns()}
        (target / "_CHECKPOINT_METADATA").write_text(json.dumps(about))
        for item in (target / "state", target / "position", target):
            (item / SUCCESS_FILE).write_text(f"Checkpoint commit was successful to {item}")
        if target != final:
            target.rename(final)
        logging.info("uploaded the local checkpoint of step %d", step)


def gather_problems(problem: str) -> list[str]:
    """Return the problems of all workers, which must all call it. problem: of this one, empty if there is none."""
    return [f"worker {i}: {text}" for i, text in enumerate(gather_texts(problem)) if text]


def local_bytes(state: Any) -> int:
    """Return the bytes of a pytree of arrays that this process writes: replicas share the writing."""
    found = 0.0
    for leaf in jax.tree.leaves(state):
        elements = math.prod(leaf.sharding.shard_shape(leaf.shape))
        copies = len(leaf.sharding.device_set) * elements / max(1, leaf.size)
        found += len(leaf.addressable_shards) * elements * leaf.dtype.itemsize / max(1.0, copies)
    return int(found)


def replaced_by(folder: str) -> str:
    """Return the record of a later attempt of this run, empty without one.

    Everything in the run's folder belongs to the attempt with the highest number, whose record is written first. The
    agent tells the name of the next one.
    """
    successor = os.environ.get("SLIPWAY_SUCCESSOR", "")
    path = epath.Path(folder).joinpath(*successor.split("/")[-2:])
    return str(path) if successor and path.exists() else ""

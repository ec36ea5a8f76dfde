"""Checkpoints through Orbax: written in the background, atomically, to local folders and gs://."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import orbax.checkpoint as ocp
from etils import epath

from conf.formats import FORMAT, RunFileError, format_problem
from conf.schema.training.refusals import unknown_metric
from conf.schema.training.settings import CheckpointSettings
from trainer.checkpoint.local_saves import SUCCESS_FILE, LocalSaves, Outputs, gather_problems
from trainer.checkpoint.outage import OutageBridge, OutageError, ReplacedError
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.storage import RunStorage, array_handler, first_line, is_outage, outage_of
from trainer.distributed.checksums import CorruptionError, DisagreementError, ReplicaChecksums, named_leaves
from trainer.distributed.preemption import PreemptedError
from trainer.distributed.runtime import gather_texts, gather_tree
from trainer.models.weights import Params
from trainer.pretrained.integrity import OUTAGE_PATTERN, altered, check_database, read_checksums, write_checksums
from trainer.step.nan_diagnosis import DivergedError

COLLECTIVE_ERRORS = (CorruptionError, DisagreementError, DivergedError, OutageError, PreemptedError, ReplacedError)
"""Errors that all workers raise together."""
LOCAL_FOLDER = "local_checkpoints"
"""Folder on a worker's disk, below the run's, for checkpoints that the bucket does not take yet."""


class BrokenCheckpointError(RuntimeError):
    """Files of a checkpoint are missing, truncated or altered."""


class RestoredCheckpoint(NamedTuple):
    step: int  # number of updates
    state: Any
    position: dict[str, Any]


class CheckpointManager:
    """The checkpoints of a run: DIR/checkpoints/<step>/, and DIR/reference/, the frozen policy, saved once.

    All processes call every method, in the same order.
    """

    def __init__(
        self, folder: str, settings: CheckpointSettings, metrics: Sequence[str] = (), log: Outputs | None = None
    ) -> None:
        """Open the run's folder, and upload what an earlier attempt could not.

        Args:
            folder: `dir` of the run file.
            settings: `checkpoint` of the run file.
            metrics: names of the values that `record_score` accepts.
            log: the other outputs of the run. Without it training does not outlast an outage of the bucket.

        Raises:
            OutageError: the bucket does not answer for `max_outage_hours`.
        """
        if settings.best and metrics and (why := unknown_metric(settings.best.metric, tuple(metrics))):
            raise RunFileError(f"checkpoint.best.metric: {why}")
        root = epath.Path(folder)
        if not folder.startswith("gs://"):
            root = root.resolve()
        self._settings = settings
        self._folder, self._reference = root / "checkpoints", root / "reference"
        self._reference_checksums = root / "reference_checksums.json"
        self._checksums = ReplicaChecksums()
        self._bridge: OutageBridge | None = None
        self._log = log
        if log is not None and log.storage.is_remote and settings.max_outage_hours:
            saves = LocalSaves(log.local / LOCAL_FOLDER, self._folder)
            self._bridge = OutageBridge(log, saves, settings.max_outage_hours)
            self._bridge.resume_earlier(self._newest_complete)
        storage = log.storage if log is not None else RunStorage(str(root))
        self._retention = Retention(root, settings, storage, writes=jax.process_index() == 0)
        self._manager = self._open()
        self._begun: int | None = None  # the step that is being written, or could not be

    def _open(self) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(preservation_policy=self._retention, cleanup_tmp_directories=True),
            item_handlers={"state": array_handler(), "position": _position_handler(self._log)},
        )

    def _newest_complete(self) -> int | None:
        if not self._folder.exists():
            return None
        found = [path for path in self._folder.iterdir() if path.name.isdigit() and (path / SUCCESS_FILE).exists()]
        return max((int(path.name) for path in found), default=None)

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None; a half-written one does not count."""
        return self._manager.latest_step()

    def should_save(self, step: int, evaluates: bool = False) -> bool:
        """Return whether a checkpoint is due after `step` updates. evaluates: an evaluation follows.

        Save before evaluating, so that a failed evaluation loses nothing.
        """
        return step % self._settings.save_interval == 0 or (evaluates and self._settings.best is not None)

    def has_begun(self, step: int) -> bool:
        """Return whether the checkpoint after `step` updates is complete or being written."""
        return step in self._manager.all_steps() and step not in self._retention.broken_steps

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Save a pytree of arrays and the loop's position after `step` updates.

        position: JSON. Each process gives its part; the union is saved, see `runtime.gather_tree`. Waits for an earlier
        save, and returns once the arrays are copied; the files are written in the background. A step that is already
        saved is not overwritten. While the bucket does not answer, the files go to the workers' disks.

        Raises:
            CorruptionError: the replicas of the state differ.
            OutageError: the bucket has not answered for too long.
        """
        self.catch_up()
        if self._bridge is not None and step in self._bridge.steps:
            return
        clear = self._bridge is None or self._bridge.can_write(self._manager)
        if clear or (step == self._begun and self._is_written()):
            self._begun = None
        damaged = step in self._retention.broken_steps
        if step in self._manager.all_steps() and step != self._begun:
            if not damaged:
                return
            if clear:
                self._manager.delete(step)
        self._retention.broken_steps.discard(step)
        checksums = self._checksums.compute(state, f"after update {step}")
        content = {"format": FORMAT, "position": gather_tree(position), "checksums": checksums}
        while not (clear and self._write(step, state, content)):
            assert self._bridge is not None, "without a bridge errors are raised"
            if self._bridge.save(step, state, content, self._retention.kept):
                return
            self._reopen()
            clear = True
            if self.has_begun(step):
                if not damaged:
                    return
                self._manager.delete(step)

    def _is_written(self) -> bool:
        """Return whether what was begun has been written by all processes, though the bucket does not answer now."""
        assert self._bridge is not None
        ended = not self._manager.is_saving_in_progress() and not outage_of(self._manager.check_for_errors)
        return all(gather_texts("ended" if ended and not self._bridge.lost_a_write else ""))

    def _write(self, step: int, state: Any, content: dict[str, Any]) -> bool:
        """Begin to write to the run's folder; return False if that failed on any process and is bridged."""
        items, problem = ocp.args.Composite(state=ocp.args.PyTreeSave(state), position=ocp.args.JsonSave(content)), ""
        try:
            with jax.transfer_guard("allow"):
                self._manager.save(step, args=items, force=True)
        except Exception as error:
            if self._bridge is None or not is_outage(error):
                raise
            problem = f"the checkpoint of step {step} was not written: {first_line(error)}"
        self._begun = step
        return self._bridge is None or not self._bridge.agree_on_failure(problem)

    def catch_up(self, *, wait: bool = False) -> None:
        """Upload the checkpoints on the workers' disks if the bucket answers again. Call it after every update.

        wait: return only then.

        Raises:
            OutageError: the bucket has not answered for too long.
        """
        if self._bridge is None or not self._bridge.suspended:
            return
        if wait:
            self._bridge.wait(self._manager)
        elif not self._bridge.resume(self._manager):
            return
        self._reopen()

    def _reopen(self) -> None:
        """Forget a save that failed in the background, and see what has been uploaded."""
        if problem := outage_of(self._manager.check_for_errors):
            logging.warning("a checkpoint was begun before the outage and is incomplete: %s", problem)
        self._manager = self._open()
        self._retention.write()

    def should_compare(self, step: int) -> bool:
        """Return whether the state is to be compared after `step` updates."""
        every = self._settings.verify_interval
        return bool(every) and step % every == 0

    def compare_if_due(self, step: int, state: Any) -> None:
        """Compare the replicas of the state on all devices if a check is due. Raises CorruptionError on all."""
        if self.should_compare(step):
            self.compare_replicas(step, state)

    def compare_at_rest(self, step: int, state: Any) -> None:
        """Run `compare_replicas` unless checks are off: before and after a phase that does not change the state."""
        if self._settings.verify_interval:
            self.compare_replicas(step, state)

    def compare_replicas(self, step: int, state: Any) -> None:
        """Compare the replicas, and the state with itself at the last check if it is of the same arrays.

        Raises CorruptionError on all processes.
        """
        self._checksums.compute(state, f"after update {step}")

    def record_score(self, step: int, **values: float) -> None:
        """Record the evaluation of the weights after `step` updates, which decides the best checkpoint."""
        if self._settings.best and self._settings.best.metric in values:
            self._retention.record_score(step, float(values[self._settings.best.metric]))

    def restore_latest(self, abstract: Any) -> RestoredCheckpoint | None:
        """Return the newest readable checkpoint, or None if there is none.

        abstract: shapes, dtypes and shardings, as from `train_step.abstract_state`; shardings may differ from the saved
        ones. Skips a broken checkpoint with a warning. Raises RunFileError if the checkpoint is of another model or
        optimizer, or if all are broken and more than the first interval would be lost.
        """
        self._manager.wait_until_finished()
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            found = self._load_verified(step, abstract)
            if isinstance(found, RestoredCheckpoint):
                return found
            self._retention.broken_steps.add(step)
            if jax.process_index() == 0:
                logging.warning("checkpoint of step %d is broken, skipping it: %s", step, found)
        if steps and steps[0] > self._settings.save_interval:
            raise RunFileError(
                f"dir: cannot read any of the checkpoints ({', '.join(map(str, reversed(steps)))}), see above; repair "
                "or remove them, or set another dir to start over"
            )
        return None

    def restore(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """Return state and position saved at `step`. Raises BrokenCheckpointError or RunFileError."""
        self._manager.wait_until_finished()
        found = self._load_verified(step, abstract)
        if isinstance(found, str):
            raise BrokenCheckpointError(found)
        return found.state, found.position

    def _load_verified(self, step: int, abstract: Any) -> RestoredCheckpoint | str:
        """Return the checkpoint if every process can read it, else the problem. All processes return the same."""
        found = self._verified(lambda: self._load(step, abstract))
        return found if isinstance(found, str) else RestoredCheckpoint(step, found[1], found[0]["position"])

    def _verified(self, load: Callable[[], tuple[dict[str, Any], Any]]) -> tuple[dict[str, Any], Any] | str:
        """Return what `load` does, arrays and their "checksums", if they match on all processes, else the problem."""
        content, state, problem = {}, None, ""
        try:
            content, state = load()
        except BrokenCheckpointError as error:
            problem = str(error)
        if problems := gather_problems(problem):
            return problems[0]
        try:
            name = altered(self._checksums.compute(state, "as restored"), content["checksums"])
        except CorruptionError as error:
            return str(error)
        return f"{name} differs from what was saved" if name else (content, state)

    def _load(self, step: int, abstract: Any) -> tuple[dict[str, Any], Any]:
        """Read the saved JSON and the state without waiting for other processes, which may fail elsewhere."""
        folder = self._folder / str(step)
        try:
            content = ocp.JsonCheckpointHandler().restore(folder / "position")
            # checked first, since failed reads of TensorStore end in pages of tracebacks
            check_database(folder / "state")
            saved = _shapes(array_handler().metadata(folder / "state").tree)
        except Exception as error:
            raise _classify_error(error) from error
        if problem := format_problem(content, f"dir: the checkpoint of step {step}"):
            raise RunFileError(problem)
        if not isinstance(content.get("checksums"), dict) or "position" not in content:
            raise BrokenCheckpointError("position is not what was saved")
        for name, shape in _shapes(abstract).items():
            if saved.get(name) != shape:
                raise RunFileError(
                    f"dir: {name} is {saved.get(name, 'absent')} in the checkpoint of step {step}, but {shape} in the "
                    "config; resume with the original model and optimizer, or set another dir"
                )
        try:
            state = array_handler().restore(folder / "state", args=_restore_args(abstract))
        except Exception as error:
            raise _classify_error(error) from error
        return dict(content), state

    def save_reference(self, params: Params) -> None:
        """Save the frozen policy unless it exists. Returns when it is complete; waits for the bucket."""
        self.catch_up(wait=True)
        if self._reference.exists() and ocp.utils.is_checkpoint_finalized(self._reference):
            return
        checksums = self._checksums.compute(params, "as the reference")
        if jax.process_index() == 0:
            write_checksums(self._reference_checksums, checksums)
        with ocp.Checkpointer(array_handler()) as checkpointer:
            # a bucket may hold objects of an interrupted attempt
            checkpointer.save(self._reference, args=ocp.args.PyTreeSave(params), force=True)

    def restore_reference(self, abstract: Params) -> Params:
        """Return the saved frozen policy. abstract: shapes, dtypes and shardings of the weights.

        Raises RunFileError on all processes if it is damaged: nothing else can be the reference of this run.
        """
        found = self._verified(lambda: self._load_reference(abstract))
        if isinstance(found, str):
            raise RunFileError(
                f"dir: {self._reference}, the policy that this run is compared with, is damaged: {found}; restore it "
                "from a copy, or set another dir to start over"
            )
        return found[1]

    def _load_reference(self, abstract: Params) -> tuple[dict[str, Any], Params]:
        try:
            check_database(self._reference)
            params = array_handler().restore(self._reference, args=_restore_args(abstract))
        except Exception as error:
            raise _classify_error(error) from error
        return {"checksums": read_checksums(self._reference_checksums)}, params

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish pending writes, unless this worker alone failed: that would wait for the others."""
        if kind is None:
            self.close()
        elif issubclass(kind, COLLECTIVE_ERRORS):
            if not issubclass(kind, (OutageError, ReplacedError)):
                self.catch_up()  # the VM may be gone in a moment: nobody waits for the bucket
            if self._bridge is None or not self._bridge.suspended:
                self._finish()
            elif self._bridge.steps and jax.process_index() == 0:
                logging.warning("the checkpoints on the workers' disks are uploaded by the next attempt on this pod")

    def close(self) -> None:
        """Wait until everything is written, to the bucket. Raises the errors of background writes."""
        while self._bridge is not None and not self._bridge.can_write(self._manager):
            self.catch_up(wait=True)
        self._finish()

    def _finish(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _classify_error(error: Exception) -> Exception:
    """Return a BrokenCheckpointError, unless the storage is unreachable and the checkpoint may be intact."""
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return error
    if OUTAGE_PATTERN.search(str(error)) or getattr(error, "code", 404) != 404:  # codes of TensorStore and gcsfs
        return error
    return BrokenCheckpointError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in named_leaves(tree).items()}


def _position_handler(log: Outputs | None) -> ocp.JsonCheckpointHandler:
    """Return a handler whose checkpoint counts once the metrics are there as well: a run that resumes reads them."""
    handler = ocp.JsonCheckpointHandler()
    save = handler.async_save

    async def save_with_metrics(*args: Any, **kwargs: Any) -> list[Any]:
        uploads = [] if log is None else [log.upload()]
        return [*(await save(*args, **kwargs) or ()), *uploads]

    handler.async_save = save_with_metrics  # a class of ours would be named in the checkpoint, for all who read it
    return handler


def _restore_args(abstract: Any) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))

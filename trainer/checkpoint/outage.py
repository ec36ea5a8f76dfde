"""Training goes on while the bucket does not answer: what is saved where, for how long, and how it gets back.

All processes agree on every decision through a gather on the hosts, so that none writes to the bucket while another
writes to its disk. No result of the training depends on any of it.
"""

import json
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
import orbax.checkpoint as ocp

from trainer.checkpoint.local_saves import LocalSaves, NoRoomError, Outputs, replaced_by
from trainer.checkpoint.storage import RunStorage, first_line, is_outage, outage_of
from trainer.distributed.runtime import gather_texts

KEY = "checkpoint.max_outage_hours"
POLL_SECONDS = 0.2
"""Interval of the looks at a bucket that is waited for, and the first ones at an earlier save that is being written."""
MAX_POLL_SECONDS = 2.0
"""Longest interval of the looks at an earlier save; each asks the bucket too."""
REPORT_SECONDS = 60.0
"""Interval of the log lines while training waits; a silent program would count as hung."""
UPLOAD_PAUSE_SECONDS = 60.0
"""Pause after an upload that failed although the bucket could be read."""
NO_ROOM_SECONDS = 900.0
"""How long training waits for the bucket if a disk has no room for a checkpoint."""
NOT_WRITTEN = "a checkpoint was not written"
"""Begins what is said of a write to the bucket that failed in the background."""


class OutageError(RuntimeError):
    """The bucket has not answered for too long. All processes raise it together."""


class ReplacedError(RuntimeError):
    """A later attempt of the run exists, and the bucket is its own. All processes raise it together."""


class OutageBridge:
    """Decides where checkpoints go. All processes call every method, in the same order.

    Attributes:
        suspended: whether checkpoints go to the workers' disks at the moment.
        lost_a_write: whether they do because a checkpoint could not be written to the bucket.
    """

    def __init__(self, log: Outputs, saves: LocalSaves, max_hours: float) -> None:
        self._log, self._storage, self._saves, self._max_hours = log, log.storage, saves, max_hours
        self._clock = log.storage.clock
        self.suspended = self.lost_a_write = False
        self._since = self._next_upload = 0.0
        self.steps: list[int] = []

    def resume_earlier(self, newest: Callable[[], int | None]) -> None:
        """Upload what an earlier attempt on this pod left on the disks; waits for the bucket.

        newest: returns the newest step in the bucket; called on process 0. Steps that are not newer are dropped.
        """
        self.steps = self._saves.steps()
        if not self.steps:
            return
        wait_for_storage(self._storage, self._max_hours)
        known = json.loads(gather_texts(json.dumps(newest() if jax.process_index() == 0 else None))[0])
        for step in [step for step in self.steps if known is not None and step <= known]:
            self._discard(step)
        if self.steps:
            self._suspend("an earlier attempt left checkpoints on the workers' disks")
            self.wait()

    def can_write(self, writer: ocp.CheckpointManager) -> bool:
        """Return whether the next checkpoint may go to the bucket; if not, the bridge is suspended.

        While the bucket answers, an earlier checkpoint that the writer still writes is waited for.
        """
        pause = POLL_SECONDS
        while not self.suspended:
            said = gather_texts(self._write_status(writer))
            if not any(said):
                return True
            if problem := next((text for text in said if text not in ("", "writing")), ""):
                self.lost_a_write = any(text.startswith(NOT_WRITTEN) for text in said)
                self._suspend(problem)
                break
            time.sleep(pause)
            pause = min(MAX_POLL_SECONDS, 1.5 * pause)
        return False

    def agree_on_failure(self, problem: str) -> bool:
        """Return whether the attempt to write failed on any process; it is suspended then."""
        if found := next(filter(None, gather_texts(problem)), ""):
            self._suspend(found)
        return bool(found)

    def save(
        self, step: int, state: Any, content: dict[str, Any], kept: Callable[[list[int]], Collection[int]]
    ) -> bool:
        """Save on the workers' disks; return False if the bucket has answered meanwhile and takes the checkpoint.

        kept: selects the steps that stay.

        Raises:
            OutageError: a disk has no room, and the bucket does not answer.
        """
        while True:
            try:
                self._saves.save(step, state, content)
                break
            except NoRoomError as error:
                if not self.steps:
                    self._wait_without_room(str(error))
                    return False
                self._discard(self.steps[0])
        self.steps = sorted({*self.steps, step})
        for old in set(self.steps) - set(kept(self.steps)):
            self._discard(old)
        return True

    def resume(self, writer: ocp.CheckpointManager | None = None) -> bool:
        """Upload the local checkpoints, in order, if every process reaches the bucket; return whether that is done.

        Raises:
            OutageError: `checkpoint.max_outage_hours` have passed.
            ReplacedError: a later attempt owns the run's folder.
        """
        now = self._clock()
        is_writing = writer is not None and writer.is_saving_in_progress()
        ready = now >= self._next_upload and self._storage.answers() and not is_writing
        said = [json.loads(text) for text in gather_texts(json.dumps([ready, now - self._since]))]
        if all(ready for ready, _ in said):
            problem = self._upload_all()
            if not problem:
                self.suspended = False
                return True
            self._next_upload = now + UPLOAD_PAUSE_SECONDS
            _warn(f"the bucket answers, but does not take the local checkpoints: {problem}")
        if said[0][1] >= 3600 * self._max_hours:
            raise OutageError(self._end_message())
        return False

    def wait(self, writer: ocp.CheckpointManager | None = None) -> None:
        """Resume as soon as possible; nothing is computed meanwhile. Raises like `resume`."""
        reported = self._clock()
        while self.suspended and not self.resume(writer):
            if self._clock() - reported >= REPORT_SECONDS:
                reported = self._clock()
                _warn(f"waiting for {self._storage.folder} ({KEY})")
            time.sleep(POLL_SECONDS)

    def _write_status(self, writer: ocp.CheckpointManager) -> str:
        """Return "" if this process may write, "writing" while it does, else the problem."""
        if not self._storage.answers():
            return "the bucket does not answer"
        if writer.is_saving_in_progress():
            return "writing"
        problem = outage_of(writer.check_for_errors)
        return problem and f"{NOT_WRITTEN}: {problem}"

    def _suspend(self, problem: str) -> None:
        self.suspended, self._since, self._next_upload = True, self._clock(), 0.0
        _warn(
            f"{problem}; training goes on, and checkpoints are saved on the workers' disks ({self._saves.folder}), "
            f"for at most {self._max_hours:g} h ({KEY})"
        )

    def _upload_all(self) -> str:
        """Upload all local checkpoints; return the first problem, empty if there is none."""
        problem = ""
        if jax.process_index() == 0:
            try:
                if successor := replaced_by(self._storage.folder):
                    problem = f"replaced {successor}"
                else:
                    self._log.upload().result()
            except Exception as error:
                if not is_outage(error):
                    raise
                problem = first_line(error)
        problem = gather_texts(problem)[0]
        if problem.startswith("replaced "):
            raise ReplacedError(f"{problem.removeprefix('replaced ')} exists: a later attempt has replaced this one")
        uploaded: list[int] = []
        while not problem and self.steps:
            problem = self._saves.upload(self.steps[0])
            if not problem:
                uploaded.append(self.steps.pop(0))
        if uploaded:
            _warn(f"the bucket answers again: uploaded the checkpoints of steps {_listed(uploaded)}")
        return problem

    def _wait_without_room(self, problem: str) -> None:
        limit = min(NO_ROOM_SECONDS, 3600 * self._max_hours)
        fix = "attach a data disk (tpu.data_disk_gb), or lower checkpoint.max_to_keep"
        _warn(f"{problem}; training waits for the bucket, for {limit / 60:g} minutes. To fix: {fix}")
        until = self._clock() + limit
        while not self.resume():
            if json.loads(gather_texts(json.dumps(self._clock() >= until))[0]):
                raise OutageError(
                    f"{KEY}: {self._storage.folder} has not answered for {limit / 60:g} minutes, and no disk has room "
                    f"for a checkpoint: {problem}. To fix: {fix}"
                )
            time.sleep(POLL_SECONDS)

    def _discard(self, step: int) -> None:
        self.steps.remove(step)
        self._saves.discard(step)

    def _end_message(self) -> str:
        message = f"{KEY}: {self._storage.folder} has not answered for {self._max_hours:g} h, the limit"
        if not self.steps:
            return f"{message}; nothing was saved meanwhile"
        return (
            f"{message}. The checkpoints of steps {_listed(self.steps)} are on the workers' disks "
            f"({self._saves.folder}): the same command uploads them and resumes there once the bucket answers, as long "
            "as the pod exists"
        )


def wait_for_storage(storage: RunStorage, max_hours: float) -> None:
    """Wait until every process reaches the storage; all must call it, before they read or write anything there.

    max_hours: 0 leaves the waiting to the retries of the first requests.

    Raises:
        OutageError: that took longer than `max_hours`.
    """
    if not storage.is_remote or not max_hours:
        return
    began = reported = storage.clock()
    while True:
        now = storage.clock()
        said = [json.loads(text) for text in gather_texts(json.dumps([storage.answers(), now - began]))]
        if all(answers for answers, _ in said):
            return
        if said[0][1] >= 3600 * max_hours:
            raise OutageError(f"{KEY}: {storage.folder} has not answered for {max_hours:g} h, the limit")
        if now - reported >= REPORT_SECONDS or reported == began:
            reported = now + 1e-9
            _warn(f"{storage.folder} does not answer; waiting, for at most {max_hours:g} h ({KEY})")
        time.sleep(POLL_SECONDS)


def _warn(message: str) -> None:
    if jax.process_index() == 0:
        logging.warning(message)


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))

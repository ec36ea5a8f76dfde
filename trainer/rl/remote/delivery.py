"""Samples of a sampler between drawing and the trainer: their rewards are computed, then they are sent."""

from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conf.schema.training.loop import GrpoLoop
from trainer.rewards.pool import RewardPool, RewardResult, Submission
from trainer.rl.remote.leases import Task
from trainer.rl.remote.wire import Arrays, Channel
from trainer.rl.rollouts import reward_names, score_sample
from trainer.sampler import Completion

Scored = tuple[Completion, Future[RewardResult]]


class AbandonedError(Exception):
    """Another sampler has the task that is being drawn, or the run ends."""


@dataclass(eq=False)
class _Unsent:
    """Samples of one task that have been drawn and not sent, by their number in the rollout."""

    task: Task
    samples: dict[int, Scored] = field(default_factory=dict)


class Deliveries:
    """Sends samples of several tasks as they are scored: a sampler draws one while rewards of others are computed."""

    def __init__(self, channel: Channel, checks: RewardPool, loop: GrpoLoop) -> None:
        self._channel, self._checks, self._loop = channel, checks, loop
        self._names = reward_names(loop)
        self._drawn: _Unsent | None = None
        self._scored: list[_Unsent] = []

    @property
    def tasks(self) -> list[Task]:
        """The tasks that have been drawn, some of whose samples have not been sent."""
        return [unsent.task for unsent in self._scored]

    def begin(self, task: Task) -> None:
        """Say that samples of a task come next. `end` must follow."""
        self._drawn = _Unsent(task)

    def add(self, number: int, drawn: Completion, submission: Submission) -> None:
        """Score a sample of the task that is being drawn, whose rollout has it under this number."""
        assert self._drawn is not None, "begun"
        self._drawn.samples[number] = drawn, self._checks.submit(self._names, submission)

    def end(self, *, whole: bool) -> None:
        """Say that no more samples of the task come; whole: all have. Else those that are not sent are dropped."""
        unsent, self._drawn = self._drawn, None
        if unsent is not None and whole and unsent.samples:
            self._scored.append(unsent)
        elif unsent is not None:
            _cancel(unsent)

    def send(self) -> None:
        """Send what is scored, which also says that this sampler is alive.

        Raises:
            AbandonedError: samples of the task that is being drawn are not wanted any more.
        """
        for unsent in list(self._scored):
            if not self._send_of(unsent):
                _cancel(unsent)
            if not unsent.samples:
                self._scored.remove(unsent)
        if self._drawn is not None and not self._send_of(self._drawn):
            raise AbandonedError

    def wait(self, seconds: float) -> None:
        """Wait until the oldest task that has been drawn is scored, for at most that long, and send what is scored."""
        wait([check for _, check in self._scored[0].samples.values()], seconds)
        self.send()

    def cancel(self) -> None:
        """Drop everything that is not sent: rewards of samples that nobody wants should not hold up others."""
        for unsent in self._scored:
            _cancel(unsent)
        self._scored.clear()
        self.end(whole=False)

    def _send_of(self, unsent: _Unsent) -> bool:
        """Send what is scored of a task; return whether the trainer wants the rest of it."""
        task, done = unsent.task, [row for row, (_, check) in unsent.samples.items() if check.done()]
        finished = [unsent.samples[row][0].finished for row in done]
        arrays: Arrays = {}
        for row in done:
            drawn, check = unsent.samples.pop(row)
            scores = np.array(score_sample(check.result(), self._loop), np.float64)
            parts = {"tokens": drawn.tokens, "logprobs": drawn.logprobs, "versions": drawn.versions}
            arrays |= {f"{row}/{name}": values for name, values in (parts | {"scores": scores}).items()}
        message: dict[str, Any] = {"kind": "samples", "rollout": task.rollout, "first": task.first}
        reply, _ = self._channel.ask(message | {"rows": done, "finished": finished}, arrays)
        return reply["go_on"]


def _cancel(unsent: _Unsent) -> None:
    for _, check in unsent.samples.values():
        check.cancel()
    unsent.samples.clear()

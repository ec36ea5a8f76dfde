"""Which sampler draws what, and is heard: tasks of a rollout, leased to samplers, and samples that have arrived.

A sampler that dies or is silent loses its tasks to others; what it has delivered stays. Pure logic: the caller
tells the time and holds the lock.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")

MAX_LOSSES = 20
"""Losses of one task after which the fault is no sampler's: whoever draws it dies."""


TaskName = tuple[int, int]
"""Rollout and first prompt of a task."""


class TaskLostError(RuntimeError):
    """A task was lost too often."""


@dataclass(frozen=True)
class Task:
    """Prompts of a rollout to draw groups for.

    Attributes:
        rollout: number of the rollout.
        first: index of the first prompt.
        count: number of prompts.
        version: updates that the weights must have seen at least.
    """

    rollout: int
    first: int
    count: int
    version: int

    @property
    def name(self) -> TaskName:
        return self.rollout, self.first


@dataclass
class _Lease:
    """A task and who draws it; nobody if `holder` is None."""

    task: Task
    holder: str | None = None
    until: float = 0.0
    losses: int = 0


@dataclass
class Leases(Generic[S]):
    """Tasks and samples of the rollouts that are being drawn.

    Attributes:
        group_size: samples per prompt. Sample n of a rollout belongs to prompt n // group_size.
        seconds: silence after which a sampler loses its task.
        kept: samples so far that arrived for the first time.
        duplicates: samples so far that arrived a second time, or too late, and were dropped.
        lost: tasks so far that a sampler has lost.
    """

    group_size: int
    seconds: float
    kept: int = 0
    duplicates: int = 0
    lost: int = 0
    _leases: list[_Lease] = field(default_factory=list)
    _samples: dict[int, dict[int, S]] = field(default_factory=dict)
    _prompts: dict[int, int] = field(default_factory=dict)

    def open(self, rollout: int, prompts: int, prompts_per_task: int, version: int) -> None:
        """Offer the tasks of a rollout, unless that has been done."""
        if rollout in self._prompts:
            return
        self._prompts[rollout], self._samples[rollout] = prompts, {}
        for first in range(0, prompts, prompts_per_task):
            task = Task(rollout, first, min(prompts_per_task, prompts - first), version)
            self._leases.append(_Lease(task))

    def take(self, sampler: str, now: float, held: Collection[TaskName] = ()) -> Task | None:
        """Lease the oldest task that nobody has; None if there is none. Raises TaskLostError.

        held: those that the sampler has drawn and still scores. Any other one that it had is offered again.
        """
        self.release(sampler, held)
        self._expire(now)
        for lease in self._leases:
            if lease.holder is None:
                lease.holder, lease.until = sampler, now + self.seconds
                return lease.task
        return None

    def renew(self, sampler: str, now: float) -> set[TaskName]:
        """Note that a sampler is alive; return which tasks it still has."""
        self._expire(now)
        own = [lease for lease in self._leases if lease.holder == sampler]
        for lease in own:
            lease.until = now + self.seconds
        return {lease.task.name for lease in own}

    def release(self, sampler: str, held: Collection[TaskName] = ()) -> None:
        """Offer a sampler's tasks to the others, as after its death, but for those held. Raises TaskLostError."""
        for lease in self._leases:
            if lease.holder == sampler and lease.task.name not in held:
                self._lose(lease)

    def deliver(self, rollout: int, row: int, sample: S) -> bool:
        """Keep a sample; return False, and drop it, if it is there already or its rollout is closed."""
        known = self._samples.get(rollout)
        if known is None or row in known or not 0 <= row < self._prompts[rollout] * self.group_size:
            self.duplicates += 1
            return False
        known[row] = sample
        self.kept += 1
        self._leases = [lease for lease in self._leases if not self._is_done(lease.task)]
        return True

    def samples(self, rollout: int) -> list[S] | None:
        """Return all samples of a rollout in order; None while some are missing."""
        known = self._samples.get(rollout, {})
        wanted = self._prompts.get(rollout, 0) * self.group_size
        return [known[row] for row in range(wanted)] if wanted and len(known) == wanted else None

    def close(self, rollout: int) -> None:
        """Forget a rollout, so that a late sample of it is dropped."""
        del self._samples[rollout], self._prompts[rollout]
        self._leases = [lease for lease in self._leases if lease.task.rollout != rollout]

    def _expire(self, now: float) -> None:
        for lease in self._leases:
            if lease.holder is not None and now >= lease.until:
                self._lose(lease)

    def _lose(self, lease: _Lease) -> None:
        lease.holder, lease.losses = None, lease.losses + 1
        self.lost += 1
        if lease.losses >= MAX_LOSSES:
            raise TaskLostError(
                f"prompts {lease.task.first} to {lease.task.first + lease.task.count - 1} of rollout "
                f"{lease.task.rollout} were lost {lease.losses} times by samplers that died or were silent; their "
                "logs say why"
            )

    def _is_done(self, task: Task) -> bool:
        rows = range(task.first * self.group_size, (task.first + task.count) * self.group_size)
        return all(row in self._samples[task.rollout] for row in rows)


REPORT_SECONDS = 60.0
"""Interval of the log lines while the trainer hears from no sampler."""
SILENCE_LIMIT_SECONDS = 1800.0
"""Silence of all samplers that ends the attempt: longer than a sampler keeps its task, a restart and a compilation."""


class SamplersLostError(RuntimeError):
    """No sampler has been heard from for too long. All processes of the trainer raise it together."""


class Presence:
    """When each sampler was last heard from. Not thread-safe.

    What counts is what a sampler's main thread sends. Requests for weights come from another thread, which goes on
    while the sampler hangs.
    """

    def __init__(self, samplers: Sequence[str]) -> None:
        """samplers: their names."""
        self._heard: dict[str, float | None] = dict.fromkeys(samplers)
        self._since = self._reported = 0.0

    def hear(self, sampler: str, now: float) -> None:
        """Note a message."""
        self._heard[sampler] = now

    def begin(self, now: float) -> None:
        """Start to wait for a rollout: samplers without tasks had nothing to send before."""
        self._since = self._reported = now

    def report(self, now: float) -> str:
        """Return a line for the log, once every REPORT_SECONDS of silence; otherwise an empty one.

        Raises:
            SamplersLostError: all samplers have been silent for SILENCE_LIMIT_SECONDS.
        """
        silence = now - max([self._since, *(time for time in self._heard.values() if time is not None)])
        if silence >= SILENCE_LIMIT_SECONDS:
            raise SamplersLostError(
                f"loop.sampler: no sampler has sent anything for {silence / 60:.0f} minutes: "
                f"{self._description(now)}. Their logs say why; they need to reach worker 0 on any TCP port"
            )
        if silence < REPORT_SECONDS or now - self._reported < REPORT_SECONDS:
            return ""
        self._reported = now
        return (
            f"waiting for a sampler (loop.sampler), for at most {SILENCE_LIMIT_SECONDS / 60:.0f} minutes: "
            f"{self._description(now)}"
        )

    def _description(self, now: float) -> str:
        parts = [
            f"{name} " + ("has never connected" if time is None else f"was last heard {now - time:.0f} s ago")
            for name, time in self._heard.items()
        ]
        return ", ".join(parts)

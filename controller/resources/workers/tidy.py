"""Workers ready for the next program: no leftovers, and enough free disk space."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.agent.protocol import OBSERVE, TIDY, Observation
from controller.context import Context
from controller.core.text import plural
from controller.reconcile.resource import Diff, ObservedResources
from controller.resources.workers.base import WorkerResource, raise_failures
from controller.ssh.fleet import DiskFullError, WorkerError

TIDY_STATE = "tidy"


@dataclass(frozen=True, kw_only=True)
class WorkerHygiene(WorkerResource):
    """No stale TPU lock, no process of an earlier attempt, huge pages where possible, and free disk space."""

    kind: ClassVar[str] = "tidied"
    min_free_gb: float = field(compare=False)
    state: tuple[str, ...]

    @classmethod
    def for_workers(cls, min_free_gb: float, workers: int, **placing: Any) -> Self:
        return cls(min_free_gb=min_free_gb, state=(TIDY_STATE,) * workers, **placing)

    @property
    def title(self) -> str:
        return f"tidy {plural(len(self.state), 'worker')}: locks, leftover processes, disk space"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        return replace(self, state=self.observe_workers(context, observed, self._state))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        fleet = self.fleet(context, observed)
        answers = fleet.call_all(TIDY, {})
        raise_failures(answers, self.title)
        for worker, answer in enumerate(answers):
            if isinstance(answer, dict):
                for message in (*answer["done"], *answer["not_done"]):
                    context.events.note(self.id, f"worker {worker}: {message}")
        looks = fleet.call_all(OBSERVE, {})
        raise_failures(looks, self.title)
        full = [(w, a["free_gb"]) for w, a in enumerate(looks) if isinstance(a, dict) and self._is_full(a)]
        if full:
            listed = "; ".join(f"worker {worker} has {free:.1f} GB free" for worker, free in full)
            raise DiskFullError(
                f"env.min_free_gb: {listed}, but {self.min_free_gb:g} GB are required; free some space, run `slipway "
                "down` to get fresh disks, or lower the key",
                [WorkerError(worker, "", "agent", f"{free:.1f} GB free") for worker, free in full],
            )

    def _state(self, answer: Observation) -> str:
        message = [*answer["untidy"], *([f"{answer['free_gb']:.1f} GB free"] if self._is_full(answer) else [])]
        return "; ".join(message) or TIDY_STATE

    def _is_full(self, answer: Observation) -> bool:
        """Return whether the disk is too full; never while a program runs, which may fill its disk."""
        return answer["active"] is None and answer["free_gb"] < self.min_free_gb

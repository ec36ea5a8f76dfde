"""The watchdog on worker 0, which deletes the pod when nobody uses it or the budget is spent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from controller.agent.protocol import GUARD, GUARD_STATE, GuardQuestion
from controller.reconcile.resource import Absent, Diff, ObservedResources
from controller.resources.pod.provisioner import end_name
from controller.resources.workers.base import WorkerResource, raise_failures

if TYPE_CHECKING:
    from controller.context import Context
    from controller.resources.pod.node import Node

GRACE_HOURS = 2 / 60
"""A controller that is there ends the run first, and in order; this much later the watchdog ends it."""


@dataclass(frozen=True, kw_only=True)
class Watchdog(WorkerResource):
    """Someone stands guard. What exactly his orders are is told with each launch: another run may have the pod now."""

    kind: ClassVar[str] = "watchdog"
    bucket: str = field(compare=False)
    idle_seconds: float | None = field(compare=False)
    standing: bool = True

    @property
    def title(self) -> str:
        if self.idle_seconds is None:
            return "watchdog: the pod deletes itself when the budget is spent"
        return f"watchdog: the pod deletes itself after {self.idle_seconds / 60:g} idle minutes"

    def observe(self, world: Context, have: ObservedResources) -> Absent | Self:
        [answer] = self.fleet(world, have).call_all(GUARD_STATE, {}, workers=[0])
        return self if isinstance(answer, dict) and answer["standing"] else Absent()

    def apply(self, world: Context, have: ObservedResources, diff: Diff) -> None:
        self.tell(world, have[self.node], None)

    def tell(self, world: Context, node: Node, hours_left: float | None) -> None:
        """Give orders, in place of older ones; the idle time begins anew.

        Args:
            hours_left: until the budget is spent; None: there is none.

        Raises:
            WorkersFailedError: worker 0 could not be told.
        """
        payload: GuardQuestion = {
            "project": world.project,
            "deletes": delete_requests(world.project, node),
            "tpu_api": world.google.root("tpu"),
            "projects_api": world.google.root("cloudresourcemanager"),
            "idle_seconds": self.idle_seconds,
            "seconds_left": None if hours_left is None else 3600 * _with_grace(hours_left),
            "bucket": self.bucket,
            "note_object": end_name(node.name, node.status.uid),
        }
        answers = node.fleet(world).call_all(GUARD, payload, workers=[0])
        raise_failures(answers, self.title)
        [answer] = answers
        if isinstance(answer, dict) and answer["allowed"] is False:
            words = (
                "the workers' service account may not delete TPUs yet, so the pod could not delete itself; grant "
                "roles/tpu.admin (docs/costs.md has a smaller role), or set cleanup.idle_minutes=null"
            )
            world.events.note(self.id, words)


def delete_requests(project: str, node: Node) -> list[str]:
    """What makes the pod go, first what applies to a queued one: its request holds the node and outlives it."""
    where = f"projects/{project}/locations/{node.place.zone}"
    return [f"{where}/queuedResources/{node.name}?force=true", f"{where}/nodes/{node.name}"]


def _with_grace(hours: float) -> float:
    """A little more than the controller grants, so that it comes first: two minutes, or a tenth of a short time."""
    return hours + min(GRACE_HOURS, hours / 10)

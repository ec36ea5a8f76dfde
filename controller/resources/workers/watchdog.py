"""Watchdog on worker 0, which deletes the pod when it is idle or the budget is spent."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

from controller.agent.protocol import SET_WATCHDOG, WATCHDOG_STATE
from controller.agent.watchdog_protocol import SetWatchdogRequest
from controller.context import Context
from controller.reconcile.resource import Absent, Diff, ObservedResources
from controller.resources.pod.node import Node
from controller.resources.pod.provisioner import end_name
from controller.resources.workers.base import WorkerResource, raise_failures


@dataclass(frozen=True, kw_only=True)
class Watchdog(WorkerResource):
    """A running watchdog. Its orders are not compared but sent at each launch, as another run may have the pod."""

    kind: ClassVar[str] = "watchdog"
    bucket: str = field(compare=False)
    idle_seconds: float | None = field(compare=False)
    running: bool = True

    @property
    def title(self) -> str:
        if self.idle_seconds is None:
            return "watchdog: heartbeat, and the end of the budget"
        return f"watchdog: the pod deletes itself after {self.idle_seconds / 60:g} idle minutes"

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        [answer] = self.fleet(context, observed).call_all(WATCHDOG_STATE, {}, workers=[0])
        return self if isinstance(answer, dict) and answer["running"] else Absent()

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        self.update_limits(context, observed[self.node], None)

    def update_limits(self, context: Context, node: Node, seconds_left: float | None) -> None:
        """Replace the watchdog's orders and restart the idle timer.

        Args:
            context: the run's context.
            node: the pod.
            seconds_left: until the watchdog deletes the pod, whatever runs; None: never.

        Raises:
            WorkersFailedError: the orders did not reach worker 0.
        """
        permission = node.plane.delete_permission(node.place.provisioner)
        payload: SetWatchdogRequest = {
            "project": context.project,
            "deletes": node.plane.deletions(context, node.name, node.place.zone),
            "delete_permission": permission,
            "projects_api": context.google.root("cloudresourcemanager"),
            "idle_seconds": self.idle_seconds,
            "seconds_left": seconds_left,
            "bucket": self.bucket,
            "note_object": end_name(node.name, node.status.uid),
        }
        answers = node.fleet(context).call_all(SET_WATCHDOG, payload, workers=[0])
        raise_failures(answers, self.title)
        [answer] = answers
        if isinstance(answer, dict) and answer["allowed"] is False:
            message = (
                "the pod cannot delete itself yet: Google takes up to seven minutes to see a new role. If it stays so, "
                f"grant the workers' service account {permission} (docs/costs.md), or set cleanup.idle_minutes=null "
                "and cleanup.heartbeat_timeout_hours=null"
            )
            context.events.note(self.id, message)

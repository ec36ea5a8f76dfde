"""The watchdog on worker 0, which deletes the pod when nobody uses it or the budget is spent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from controller.resource import Absent, Diff, Have
from controller.resources.workers import OnWorkers, raise_failures
from controller.spending import end_name

if TYPE_CHECKING:
    from controller.resources.node import Node
    from controller.world import World

GRACE_HOURS = 2 / 60
"""A controller that is there ends the run first, and in order; this much later the watchdog ends it."""


@dataclass(frozen=True, kw_only=True)
class Watchdog(OnWorkers):
    """`idle_seconds` without a program or a login, or `hours_left` from now: then the pod deletes itself."""

    kind: ClassVar[str] = "watchdog"
    bucket: str = field(compare=False)
    idle_seconds: float | None
    hours_left: float | None = None

    @property
    def title(self) -> str:
        idle = f"after {self.idle_seconds / 60:g} idle minutes" if self.idle_seconds is not None else ""
        spent = "when the budget is spent" if self.hours_left is not None else ""
        return f"watchdog: the pod deletes itself {' or '.join(filter(None, (idle, spent)))}".rstrip()

    def wanted(self) -> dict[str, Any]:
        """None is a wish, too: an older order would delete the pod too early."""
        return {"idle_seconds": self.idle_seconds or 0.0, "hours_left": self.hours_left or 0.0}

    def observe(self, world: World, have: Have) -> Absent | Self:
        [answer] = self.fleet(world, have).call_all("guard_state", {}, workers=[0])
        if not isinstance(answer, dict) or not answer["standing"]:
            return Absent()
        left = None if answer["seconds_left"] is None else answer["seconds_left"] / 3600
        if left is not None and self.hours_left is not None and abs(left - _granted(self.hours_left)) < GRACE_HOURS / 2:
            left = self.hours_left  # time has passed since it was told, no more
        return replace(self, idle_seconds=answer["idle_seconds"] or 0.0, hours_left=left or 0.0)

    def apply(self, world: World, have: Have, diff: Diff) -> None:
        node: Node = have[self.node]
        payload = {
            "project": world.project,
            "deletes": deletes(world.project, node),
            "tpu_api": world.google.root("tpu"),
            "projects_api": world.google.root("cloudresourcemanager"),
            "idle_seconds": self.idle_seconds,
            "seconds_left": None if self.hours_left is None else 3600 * _granted(self.hours_left),
            "bucket": self.bucket,
            "note_object": end_name(node.name, node.uid),
        }
        answers = self.fleet(world, have).call_all("guard", payload, workers=[0])
        raise_failures(answers, self.title)
        [answer] = answers
        if isinstance(answer, dict) and answer["allowed"] is False:
            words = (
                "the workers' service account may not delete TPUs yet, so the pod could not delete itself; grant "
                "roles/tpu.admin (docs/costs.md has a smaller role), or set cleanup.idle_minutes=null"
            )
            world.events.emit("note", self.id, words)


def deletes(project: str, node: Node) -> list[str]:
    """What makes the pod go, first what applies to a queued one: its request holds the node and outlives it."""
    where = f"projects/{project}/locations/{node.zone}"
    return [f"{where}/queuedResources/{node.name}?force=true", f"{where}/nodes/{node.name}"]


def _granted(hours: float) -> float:
    """A little more than the controller grants, so that it comes first: two minutes, or a tenth of a short time."""
    return hours + min(GRACE_HOURS, hours / 10)

"""The time at which the watchdog deletes a pod because the budget of its run is spent."""

from controller.context import Context
from controller.core.errors import SlipwayError
from controller.plan.build import Plan
from controller.records.spending import Spending
from controller.resources.pod.node import Node
from controller.resources.workers.watchdog import Watchdog

LEAST_SECONDS = 60.0
"""Shortest interval between two orders to a watchdog."""


class BudgetDeadline:
    """Tells the watchdog of one pod when the budget is spent, and again while that changes.

    The deadline assumes that all pods of the run are billed until then. With several pods it comes too early while some
    are not rented, so it is computed again whenever half of the time to it has passed.
    """

    def __init__(self, plan: Plan, context: Context, spending: Spending, node: Node) -> None:
        self._watchdogs = [resource for resource in plan.resources if isinstance(resource, Watchdog)]
        self._context, self._spending, self._node = context, spending, node
        self._due: float | None = None

    def send(self) -> None:
        """Tell the watchdog. Raises WorkersFailedError if worker 0 does not answer."""
        hours = self._spending.hours_left()
        pause = None if hours is None or self._spending.account.pods == 1 else max(LEAST_SECONDS, 3600 * hours / 2)
        self._due = None if pause is None else self._context.clock.monotonic() + pause
        for watchdog in self._watchdogs:
            watchdog.update_limits(self._context, self._node, hours)

    def send_if_due(self) -> None:
        """Tell the watchdog again, if it is time; one that cannot be reached keeps its earlier deadline until then."""
        if self._due is None or self._context.clock.monotonic() < self._due:
            return
        try:
            self.send()
        except SlipwayError as error:
            self._context.events.note(self._node.id, f"the watchdog keeps its deadline for now: {error}")

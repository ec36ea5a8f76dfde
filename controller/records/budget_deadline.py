"""The time at which the watchdog deletes a pod because the budget of its run is spent."""

from controller.context import Context
from controller.core.errors import LeaseLostError, SlipwayError
from controller.lease.lease import LeaseHeldError
from controller.plan.build import Plan
from controller.records.spending import Spending
from controller.resources.pod.node import Node
from controller.resources.workers.worker import Watchdog

LEAST_SECONDS = 60.0
"""Shortest interval between two orders to a watchdog, and the least by which an order moves the deadline."""
GRACE_SECONDS = 120.0
"""Delay that lets a live controller end the run first, in order, before the watchdog deletes the pod."""


class BudgetDeadline:
    """Tells the watchdog of one pod when the budget is spent, and again while that moves away.

    The deadline assumes that all pods of the run are billed until then. With several pods it comes too early while some
    are not rented, so it is computed again whenever half of the time to it has passed. It never moves nearer.
    """

    def __init__(self, plan: Plan, context: Context, spending: Spending, node: Node) -> None:
        self._watchdogs = [resource for resource in plan.resources if isinstance(resource, Watchdog)]
        self._context, self._spending, self._node = context, spending, node
        self._grace = self._until = 0.0
        self._due: float | None = None

    def send(self) -> None:
        """Tell the watchdog. Raises WorkersFailedError if worker 0 does not answer."""
        left = self._seconds_left()
        self._grace = 0.0 if left is None else min(GRACE_SECONDS, left / 10)
        self._order(left)

    def send_if_due(self) -> None:
        """Tell the watchdog again, if it is time and the deadline has moved away.

        A watchdog that cannot be reached keeps its deadline for now. Once the budget is spent nothing is sent: the
        controller ends the run, and the watchdog must not be faster.

        Raises:
            LeaseLostError: another controller has the pod.
        """
        if self._due is None or self._context.clock.boot_time() < self._due:
            return
        left = self._seconds_left()
        if left is None or left == 0.0:
            self._due = None
            return
        if self._context.clock.boot_time() + left + self._grace < self._until + LEAST_SECONDS:
            self._schedule(left)
            return
        try:
            self._context.before_pod_write()  # this controller may have slept while another one took the pod over
            self._order(left)
        except (LeaseHeldError, LeaseLostError):
            raise
        except SlipwayError as error:
            self._due = self._context.clock.boot_time() + LEAST_SECONDS
            self._context.events.note(self._node.id, f"the watchdog keeps its deadline for now: {error}")

    def _seconds_left(self) -> float | None:
        hours = self._spending.hours_left()
        return None if hours is None else 3600 * hours

    def _order(self, left: float | None) -> None:
        """Give the watchdog its limits; `left`: seconds until the budget is spent."""
        now = self._context.clock.boot_time()
        for watchdog in self._watchdogs:
            watchdog.update_limits(self._context, self._node, None if left is None else left + self._grace)
        if left is not None and self._spending.account.pods > 1:
            self._until = now + left + self._grace
            self._schedule(left)

    def _schedule(self, left: float) -> None:
        self._due = self._context.clock.boot_time() + max(LEAST_SECONDS, left / 2)

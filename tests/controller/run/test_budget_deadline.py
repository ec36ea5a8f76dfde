"""The deadline of the budget that a watchdog has: moved while some pods of a run are not rented."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import LeaseLostError
from controller.resources.workers.worker import Watchdog
from controller.run.attempt import GRACE_SECONDS, LEAST_SECONDS, BudgetDeadline
from controller.ssh.fleet import WorkerError
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context


class Run:
    """A run with a watchdog that notes its orders, in hours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pods: int, hours: float | None) -> None:
        self.clock, self.hours, self.orders, self.notes = ManualClock(), hours, list[float | None](), list[str]()
        self.error: Exception | None = None
        monkeypatch.setattr(Watchdog, "update_limits", lambda watchdog, context, node, left: self.order(left))
        watchdog = Watchdog(name="pod", node="node/pod", bucket="b", idle_seconds=None)
        self.context = make_context(None, clock=self.clock, notes=self.notes)
        spending = SimpleNamespace(hours_left=lambda: self.hours, account=SimpleNamespace(pods=pods))
        plan, node = SimpleNamespace(resources=(watchdog,)), SimpleNamespace(id="node/pod")
        self.deadline = BudgetDeadline(cast(Any, plan), self.context, cast(Any, spending), cast(Any, node))
        self.deadline.send()

    def order(self, left: float | None) -> None:
        if self.error is not None:
            raise self.error
        self.orders.append(left if left is None else left / 3600)

    def at(self, hours: float) -> list[float | None]:
        """Return the orders so far, after a look at this time."""
        self.clock.elapsed = 3600 * hours
        self.deadline.send_if_due()
        return self.orders


def with_grace(*hours: float) -> Any:
    return pytest.approx([each + GRACE_SECONDS / 3600 for each in hours])


def test_with_one_pod_the_first_deadline_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, pods=1, hours=10.0)
    assert run.at(9.9) == with_grace(10.0)
    assert Run(monkeypatch, pods=2, hours=None).at(1000.0) == [None]
    assert Run(monkeypatch, pods=1, hours=0.1).orders == pytest.approx([0.11]), "a short budget has a short grace"


def test_with_several_it_is_computed_again_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, pods=2, hours=10.0)
    assert run.at(4.9) == with_grace(10.0)
    run.hours = 7.5  # one of the two was not rented
    assert run.at(5.0) == with_grace(10.0, 7.5)
    assert run.at(8.7) == with_grace(10.0, 7.5)
    run.hours = 4.0
    assert run.at(8.75) == with_grace(10.0, 7.5, 4.0), "the grace is that of the whole budget"


def test_a_deadline_that_does_not_move_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pods are rented; an order of no time would delete them while the controller ends the run in order."""
    run = Run(monkeypatch, pods=2, hours=10.0)
    for now in (5.0, 7.5, 9.0, 9.95):
        run.hours = 10.0 - now
        assert run.at(now) == with_grace(10.0)
    run.hours = 2.0
    assert run.at(9.98) == with_grace(10.0, 2.0)
    spent = Run(monkeypatch, pods=2, hours=1.0)
    spent.hours = 0.0
    assert spent.at(0.6) == spent.at(2.0) == with_grace(1.0)


def test_a_worker_that_does_not_answer_keeps_its_deadline_and_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, pods=3, hours=2.0)
    run.error = WorkerError(0, "10.0.0.2", "timeout", "no route")
    run.hours = 1.5
    assert run.at(1.0) == with_grace(2.0)
    assert "the watchdog keeps its deadline for now: " in run.notes[-1]
    run.error = None
    assert run.at(1.0 + LEAST_SECONDS / 3600 - 1e-6) == with_grace(2.0)
    assert run.at(1.0 + LEAST_SECONDS / 3600) == with_grace(2.0, 1.5)


def test_a_controller_that_has_lost_its_lease_sends_nothing_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It slept while another one took the pod over."""
    run = Run(monkeypatch, pods=2, hours=2.0)

    def lost() -> int:
        raise LeaseLostError("taken over")

    run.context.before_pod_write = lost
    with pytest.raises(LeaseLostError):
        run.at(1.5)
    assert run.orders == with_grace(2.0)

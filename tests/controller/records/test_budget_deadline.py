"""The deadline of the budget that a watchdog has: moved while some pods of a run are not rented."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.clock import Clock
from controller.core.events import Events
from controller.records.budget_deadline import LEAST_SECONDS, BudgetDeadline
from controller.resources.workers.watchdog import Watchdog
from controller.ssh.fleet import WorkerError


class Hands(Clock):
    """A clock that is set by hand."""

    time = 0.0

    def monotonic(self) -> float:
        return self.time


class Run:
    """A run with a watchdog that notes its orders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pods: int, hours: float | None) -> None:
        self.clock, self.hours, self.orders, self.notes = Hands(), hours, list[float | None](), list[str]()
        self.error: Exception | None = None
        events = Events(self.clock)
        events.add_listener(lambda event: self.notes.append(event.message))
        monkeypatch.setattr(Watchdog, "update_limits", lambda watchdog, context, node, left: self.order(left))
        watchdog = Watchdog(name="pod", node="node/pod", bucket="b", idle_seconds=None)
        context = SimpleNamespace(clock=self.clock, events=events)
        spending = SimpleNamespace(hours_left=lambda: self.hours, account=SimpleNamespace(pods=pods))
        parts: list[Any] = [SimpleNamespace(resources=(watchdog,)), context, spending, SimpleNamespace(id="node/pod")]
        self.deadline = BudgetDeadline(*parts)
        self.deadline.send()

    def order(self, left: float | None) -> None:
        if self.error is not None:
            raise self.error
        self.orders.append(left)

    def at(self, hours: float) -> list[float | None]:
        """Return the orders so far, after a look at this time."""
        self.clock.time = 3600 * hours
        self.deadline.send_if_due()
        return self.orders


def test_with_one_pod_the_first_deadline_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, pods=1, hours=10.0)
    assert run.at(9.9) == [10.0]
    assert Run(monkeypatch, pods=2, hours=None).at(1000.0) == [None]


def test_with_several_it_is_computed_again_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, pods=2, hours=10.0)
    assert run.at(4.9) == [10.0]
    run.hours = 7.5  # one of the two was not rented
    assert run.at(5.0) == [10.0, 7.5]
    assert run.at(8.7) == [10.0, 7.5]
    run.hours = 0.0
    assert run.at(8.75) == [10.0, 7.5, 0.0]
    assert run.at(8.75 + LEAST_SECONDS / 3600 - 1e-6) == [10.0, 7.5, 0.0]


def test_a_worker_that_does_not_answer_keeps_its_deadline_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, pods=3, hours=2.0)
    run.error = WorkerError(0, "10.0.0.2", "timeout", "no route")
    run.hours = 1.5
    assert run.at(1.0) == [2.0]
    assert "the watchdog keeps its deadline for now: " in run.notes[-1]
    run.error = None
    assert run.at(1.5) == [2.0]
    assert run.at(1.75) == [2.0, 1.5]

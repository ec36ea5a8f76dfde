"""What a controller does about a run that another one drives on another pod."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from controller.lease.store import LeaseRecord, LeaseSnapshot
from controller.run.drive import RunDriver
from controller.run.standby import LeaderGaveUpError, RemoteStandby, StandbyOutcome

TERM = LeaseRecord(3, "1", "anna@lab", "laptop", "run-1", "", 0.0, 60.0, pod="pod-a")
HELD = LeaseSnapshot(TERM, 1, 0.0)


def ended(**how: Any) -> LeaseSnapshot:
    return LeaseSnapshot(LeaseRecord.from_json(TERM.to_json() | {"released": True, **how}), 2, 0.0)


class Scene:
    """Another controller holds the lease of the run for three looks; then comes what a test says."""

    def __init__(self, then: LeaseSnapshot | None, result: object = None) -> None:
        self.looks, self.notes, self.slept = [HELD, HELD, HELD, then], list[str](), 0
        self.lease: Any = SimpleNamespace(read=lambda: self.looks.pop(0), is_held_by_other=lambda seen: seen is HELD)
        self.ledger: Any = SimpleNamespace(result=lambda: result if len(self.looks) < 2 else None)
        events = SimpleNamespace(note=lambda subject, message: self.notes.append(message))
        self.context: Any = SimpleNamespace(clock=SimpleNamespace(sleep=self.sleep), events=events)
        self.plan: Any = SimpleNamespace(run_id="run-1", node=SimpleNamespace(name="pod-b"))

    def sleep(self, seconds: float) -> None:
        self.slept += 1

    def watch(self) -> Any:
        screen: Any = SimpleNamespace()
        return RemoteStandby(self.plan, self.context, self.ledger, self.lease, screen, 5.0).watch(HELD)


def test_it_waits_for_the_result() -> None:
    scene = Scene(None, result="the result")
    assert scene.watch() == "the result"
    assert scene.slept == 2
    assert "drives this run on the pod pod-a; watching, and taking over if it disappears" in scene.notes[0]


@pytest.mark.parametrize(
    ("then", "outcome"),
    [(ended(), StandbyOutcome.LEASE_FREE), (ended(message="cancelled", exit_code=0), StandbyOutcome.ENDED)],
)
def test_it_goes_on_where_the_other_one_stopped(then: LeaseSnapshot, outcome: StandbyOutcome) -> None:
    assert Scene(then).watch() is outcome


def test_a_run_that_was_given_up_is_given_up_here_too() -> None:
    with pytest.raises(LeaderGaveUpError, match="no more money"):
        Scene(ended(message="no more money", exit_code=7)).watch()


class Driver:
    """As much of a RunDriver as decides about a run that is driven elsewhere."""

    def __init__(self, *, take_over: bool = False, detach: bool = False) -> None:
        self.notes, self.taken = list[str](), list[str]()
        self._take_over = take_over
        self.options = SimpleNamespace(detach=detach)
        self.run_lease = SimpleNamespace(take_over=lambda why, tell: self.taken.append(why))

    def _emit_note(self, message: str) -> None:
        self.notes.append(message)

    def decide(self) -> Any:
        me: Any = self
        return RunDriver._watch_elsewhere(me, HELD)


def test_detached_it_only_says_so() -> None:
    driver = Driver(detach=True)
    assert driver.decide() is StandbyOutcome.DETACHED
    assert "drives it on the pod pod-a; the run continues" in driver.notes[0]


def test_take_over_moves_the_run_once() -> None:
    driver = Driver(take_over=True)
    assert driver.decide() is StandbyOutcome.LEASE_FREE
    assert driver.taken == ["taken over"]
    assert "the workers of pod-a stop the run's program" in driver.notes[0]
    assert not driver._take_over, "the next controller that appears is not replaced too"

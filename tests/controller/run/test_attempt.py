"""What a controller does about another run on its pod, and about its run where another controller drives it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import ConfigError
from controller.lease.lease import LeaseHeldError
from controller.lease.store import Identity, LeaseRecord, LeaseSnapshot
from controller.run import attempt
from controller.run.attempt import AttemptRunner
from controller.run.drive import RunDriver
from controller.run.standby import LeaderGaveUpError, RemoteStandby, StandbyOutcome
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context


def runner(**parts: Any) -> AttemptRunner:
    """A runner of q-2 that has these parts."""
    made = object.__new__(AttemptRunner)
    plain = {"plan": SimpleNamespace(run_id="q-2"), "options": SimpleNamespace(yes=False), "context": None}
    vars(made).update(plain | {"_may_stop": None} | parts)
    return made


@pytest.mark.parametrize(("still_runs", "said"), [(True, "stopped q-1"), (False, "q-1 has ended meanwhile")])
def test_a_run_that_ended_during_the_question_is_let_be(
    monkeypatch: pytest.MonkeyPatch, still_runs: bool, said: str
) -> None:
    seen, stopped, notes = [{"q-1"}, {"q-1"} if still_runs else set()], list[str](), list[str]()
    monkeypatch.setattr(attempt, "running_runs", lambda fleet: seen.pop(0))
    monkeypatch.setattr(attempt, "stop", lambda fleet, run: stopped.append(run))
    asking = runner(_note=lambda message, **_: notes.append(message), _ask_to_stop=lambda other: None)
    asking._stop_leftover_program(cast(Any, None))
    assert (stopped, notes) == (["q-1"] if still_runs else [], [said])


def test_a_busy_pod_is_said_before_anything_is_changed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SimpleNamespace(is_ready=True, accepts_our_key=lambda context: True, fleet=lambda context: None)
    monkeypatch.setattr(attempt, "Node", SimpleNamespace)
    monkeypatch.setattr(attempt, "running_runs", lambda fleet: {"q-1", "q-2"})
    answers, changed = [False, True], list[str]()

    def reconcile() -> Any:
        changed.append("the pod")
        raise ConfigError("enough")

    plan = SimpleNamespace(run_id="q-2", observe_pod=lambda context: node)
    agreed = runner(plan=plan, screen=SimpleNamespace(ask=lambda *_, **__: answers.pop(0)), _reconcile=reconcile)
    with pytest.raises(ConfigError, match="the pod is busy with q-1; --queue waits for it"):
        agreed.provision()
    assert changed == []
    for _ in range(2):  # who agreed is not asked again
        with pytest.raises(ConfigError, match="enough"):
            agreed.provision()
    assert (changed, answers, agreed._may_stop) == (["the pod", "the pod"], [], {"q-1"})


@pytest.mark.parametrize("is_billed", [False, True])
def test_a_pod_that_another_controller_acquired_is_not_billed(monkeypatch: pytest.MonkeyPatch, is_billed: bool) -> None:
    """Nothing had to be changed there, so nothing else has asked for the lease."""
    other = LeaseSnapshot(Identity("laptop", "q-1").new_record(1, 0.0, 60.0), 1, 0.0)
    billed = list[str]()

    def held() -> None:
        raise LeaseHeldError(other, "pod")

    monkeypatch.setattr(attempt, "running_runs", lambda fleet: set())
    late = runner(
        context=SimpleNamespace(before_pod_write=held),
        lease=SimpleNamespace(check=held),
        spending=SimpleNamespace(open_billing=billed.append, is_billed=lambda node: is_billed),
        _reconcile=lambda: SimpleNamespace(fleet=lambda context: None),
        _may_stop=set(),
    )
    with pytest.raises(LeaseHeldError, match="for q-1"):
        late.provision()
    assert billed == []


TERM = LeaseRecord(3, "1", "anna@lab", "laptop", "run-1", "", 0.0, 60.0, pod="pod-a")
HELD = LeaseSnapshot(TERM, 1, 0.0)


def ended(**how: Any) -> LeaseSnapshot:
    return LeaseSnapshot(LeaseRecord.from_json(TERM.to_json() | {"released": True, **how}), 2, 0.0)


class Watched:
    """Another controller holds the lease of the run for three looks; then comes what a test says."""

    def __init__(self, then: LeaseSnapshot | None, result: object = None) -> None:
        self.looks, self.notes, self.clock = [HELD, HELD, HELD, then], list[str](), ManualClock()
        self.lease: Any = SimpleNamespace(read=lambda: self.looks.pop(0), is_held_by_other=lambda seen: seen is HELD)
        self.ledger: Any = SimpleNamespace(result=lambda: result if len(self.looks) < 2 else None)
        self.context = make_context(None, clock=self.clock, notes=self.notes)
        self.plan: Any = SimpleNamespace(run_id="run-1", node=SimpleNamespace(name="pod-b"))

    def watch(self) -> Any:
        screen: Any = SimpleNamespace()
        return RemoteStandby(self.plan, self.context, self.ledger, self.lease, screen, 5.0).watch(HELD)


def test_it_waits_for_the_result() -> None:
    run = Watched(None, result="the result")
    assert run.watch() == "the result"
    assert len(run.clock.sleeps) == 2
    assert "drives this run on the pod pod-a; watching, and taking over if it disappears" in run.notes[0]


def test_it_goes_on_where_the_other_one_stopped_unless_that_has_given_up() -> None:
    assert Watched(ended()).watch() is StandbyOutcome.LEASE_FREE
    assert Watched(ended(message="cancelled", exit_code=0)).watch() is StandbyOutcome.ENDED
    with pytest.raises(LeaderGaveUpError, match="no more money"):
        Watched(ended(message="no more money", exit_code=7)).watch()


def test_detached_it_only_says_so_and_take_over_moves_the_run_once() -> None:
    """As much of a RunDriver as decides about a run that is driven elsewhere."""
    notes, taken, options = list[str](), list[str](), SimpleNamespace(detach=True)
    lease = SimpleNamespace(take_over=lambda why, tell: taken.append(why))
    driver: Any = SimpleNamespace(_take_over=False, options=options, run_lease=lease, _emit_note=notes.append)
    assert RunDriver._watch_elsewhere(driver, HELD) is StandbyOutcome.DETACHED
    assert "drives it on the pod pod-a; the run continues" in notes[0]
    driver._take_over, options.detach = True, False
    assert RunDriver._watch_elsewhere(driver, HELD) is StandbyOutcome.LEASE_FREE
    assert taken == ["taken over"]
    assert "the workers of pod-a stop the run's program" in notes[1]
    assert not driver._take_over, "the next controller that appears is not replaced too"

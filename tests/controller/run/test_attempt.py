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


@pytest.mark.parametrize(("still_runs", "said"), [(True, "stopped q-1"), (False, "q-1 has ended meanwhile")])
def test_a_run_that_ended_while_the_question_stood_is_not_stopped(
    monkeypatch: pytest.MonkeyPatch, still_runs: bool, said: str
) -> None:
    seen = [{"q-1"}, {"q-1"} if still_runs else set()]
    stopped: list[str] = []
    notes: list[str] = []
    monkeypatch.setattr(attempt, "running_runs", lambda fleet: seen.pop(0))
    monkeypatch.setattr(attempt, "stop", lambda fleet, run: stopped.append(run))
    runner: Any = SimpleNamespace(
        plan=SimpleNamespace(run_id="q-2"),
        options=SimpleNamespace(yes=False),
        screen=SimpleNamespace(ask=lambda question, yes: True),
        _note=lambda message, **data: notes.append(message),
        _may_stop=None,
        _ask_to_stop=lambda other: None,
    )
    AttemptRunner._stop_leftover_program(runner, fleet=None)  # pyright: ignore[reportArgumentType]
    assert (stopped, notes) == (["q-1"] if still_runs else [], [said])


def test_a_busy_pod_is_said_before_anything_is_changed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SimpleNamespace(is_ready=True, accepts_our_key=lambda context: True, fleet=lambda context: None)
    monkeypatch.setattr(attempt, "Node", SimpleNamespace)
    monkeypatch.setattr(attempt, "running_runs", lambda fleet: {"q-1", "q-2"})
    answers, changed = [False, True], list[str]()

    class Runner(AttemptRunner):
        def __init__(self) -> None:
            self.plan: Any = SimpleNamespace(run_id="q-2", observe_pod=lambda context: node)
            self.context, self.options = cast(Any, None), cast(Any, SimpleNamespace(yes=False))
            self.screen = cast(Any, SimpleNamespace(ask=lambda question, yes: answers.pop(0)))

        def _reconcile(self) -> Any:
            changed.append("the pod")
            raise ConfigError("enough")

    with pytest.raises(ConfigError, match="the pod is busy with q-1; --queue waits for it"):
        Runner().provision()
    assert changed == []
    agreed = Runner()
    for _ in range(2):  # who agreed is not asked again
        with pytest.raises(ConfigError, match="enough"):
            agreed.provision()
    assert (changed, answers, agreed._may_stop) == (["the pod", "the pod"], [], {"q-1"})


@pytest.mark.parametrize("is_billed", [False, True])
def test_a_pod_that_another_controller_has_acquired_is_not_billed_to_this_run(
    monkeypatch: pytest.MonkeyPatch, is_billed: bool
) -> None:
    """Nothing had to be changed there, so nothing else has asked for the lease."""
    other = LeaseSnapshot(Identity("laptop", "q-1").new_record(1, 0.0, 60.0), 1, 0.0)
    billed = list[str]()

    def held() -> None:
        raise LeaseHeldError(other, "pod")

    class Runner(AttemptRunner):
        def __init__(self) -> None:
            self.plan = cast(Any, SimpleNamespace(run_id="q-2"))
            self.context = cast(Any, SimpleNamespace(before_pod_write=held))
            self.lease = cast(Any, SimpleNamespace(check=held))
            opening = {"open_billing": lambda node: billed.append("the pod"), "is_billed": lambda node: is_billed}
            self.spending = cast(Any, SimpleNamespace(**opening))

        def _reconcile(self) -> Any:
            return SimpleNamespace(fleet=lambda context: None)

    monkeypatch.setattr(attempt, "running_runs", lambda fleet: set())
    runner = Runner()
    runner._may_stop = set()
    with pytest.raises(LeaseHeldError, match="for q-1"):
        runner.provision()
    assert billed == []


TERM = LeaseRecord(3, "1", "anna@lab", "laptop", "run-1", "", 0.0, 60.0, pod="pod-a")
HELD = LeaseSnapshot(TERM, 1, 0.0)


def ended(**how: Any) -> LeaseSnapshot:
    return LeaseSnapshot(LeaseRecord.from_json(TERM.to_json() | {"released": True, **how}), 2, 0.0)


class Watched:
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
    run = Watched(None, result="the result")
    assert run.watch() == "the result"
    assert run.slept == 2
    assert "drives this run on the pod pod-a; watching, and taking over if it disappears" in run.notes[0]


@pytest.mark.parametrize(
    ("then", "outcome"),
    [(ended(), StandbyOutcome.LEASE_FREE), (ended(message="cancelled", exit_code=0), StandbyOutcome.ENDED)],
)
def test_it_goes_on_where_the_other_one_stopped(then: LeaseSnapshot, outcome: StandbyOutcome) -> None:
    assert Watched(then).watch() is outcome


def test_a_run_that_was_given_up_is_given_up_here_too() -> None:
    with pytest.raises(LeaderGaveUpError, match="no more money"):
        Watched(ended(message="no more money", exit_code=7)).watch()


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

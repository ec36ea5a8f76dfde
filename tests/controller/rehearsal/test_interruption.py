"""The preemption of a rehearsal strikes after the program's first output; what is proven by it, and what is not."""

from __future__ import annotations

from typing import Any

from controller.core.events import Event
from controller.rehearsal.interruption import FAULT_KEY, PREEMPTION, Interruption
from controller.rehearsal.rehearsal import Check, check_recovery


def launched(attempt: int) -> Event:
    return Event(0.0, "note", "r", "launched", {"attempt": attempt, "launched": True})


def said(text: str = "hello\n") -> Event:
    return Event(0.0, "log", "r", text, {"worker": 1})


def steps(*numbers: int, time: float | None = None) -> list[Event]:
    lines: list[dict[str, Any]] = [{"step": n, "steps_total": 100} | ({"time": time} if time else {}) for n in numbers]
    return [Event(0.0, "metrics", "r", "", {"metrics": line}) for line in lines]


def tell(events: list[Event], strike: list[str] | None = None) -> Interruption:
    interruption = Interruption((lambda: strike.append("!")) if strike is not None else None)
    for event in events:
        interruption(event)
    return interruption


def fault(left: int = 0, **spec: Any) -> dict[str, Any]:
    return {"spec": {**(spec or PREEMPTION)}, "left": left}


def recovered(events: list[Event], attempts: int = 2) -> Check:
    [check] = check_recovery({f"{FAULT_KEY}/000": fault()}, attempts, tell(events))
    return check


def test_it_strikes_once_and_only_after_the_program_has_said_something() -> None:
    strikes: list[str] = []
    tell([Event(0.0, "note", "r", "the pod is ready"), launched(1)], strikes)
    assert strikes == []
    tell([launched(1), said(), said(), *steps(1, 2)], strikes)
    assert strikes == ["!"]


def test_a_program_that_goes_on_is_said_to_go_on_where_it_did() -> None:
    check = recovered([launched(1), *steps(1, 2, 40), launched(2), *steps(31, 32)])
    assert (check.passed, check.doubtful) == (True, False)
    assert check.message == (
        "preempted (4 s after its first output): replaced, and the program resumed: 2 attempts; "
        "at step 31 of 100; step 40 was reached before"
    )


def test_a_program_without_checkpoints_is_a_warning() -> None:
    check = recovered([launched(1), *steps(1, 2, 40), launched(2), *steps(1, 2)])
    assert (check.passed, check.doubtful) == (True, True)
    assert check.message.endswith(
        "started again: 2 attempts; from the beginning, at step 1 of 100: it loaded no checkpoint"
    )


def test_lines_that_the_program_restores_are_not_its_steps() -> None:
    restored = [*steps(1, time=10), *steps(40, time=20)]
    check = recovered([launched(1), *restored, launched(2), *restored, *steps(41, time=50)])
    assert "at step 41 of 100" in check.message


def test_without_steps_it_is_unknown_where_the_program_went_on() -> None:
    check = recovered([launched(1), said(), launched(2), said()])
    assert (check.passed, check.doubtful) == (True, True)
    assert "reports no steps" in check.message


def test_with_no_step_before_the_preemption_it_is_unknown_as_well() -> None:
    """A machine so busy that the first attempt's steps came late."""
    check = recovered([launched(1), said(), launched(2), *steps(3, 4)])
    assert (check.passed, check.doubtful) == (True, True)
    assert check.message.endswith(
        "started again: 2 attempts; at step 3 of 100; no step arrived before the preemption to compare it with"
    )


def test_a_preemption_outside_of_the_program_proves_nothing() -> None:
    check = recovered([launched(1), said()], attempts=1)
    assert not check.passed
    assert "nothing proven, because it struck while the program was not running" in check.message


def test_no_interruption_proves_nothing() -> None:
    [check] = check_recovery({}, 1, tell([launched(1)], []))
    assert not check.passed
    assert "not interrupted: nothing proven" in check.message
    [check] = check_recovery({f"{FAULT_KEY}/000": fault(1)}, 1, tell([launched(1), said()], []))
    assert not check.passed
    assert "nothing proven, because the program ended before" in check.message


def test_faults_of_the_user_are_judged_as_before() -> None:
    [check] = check_recovery({"r/000": fault(0, kind="stockout", times=1)}, 1, Interruption())
    assert (check.passed, check.message) == (True, "stockout (times 1): overcome")

"""The preemption of a rehearsal strikes after the program's first output; what is proven by it, and what is not."""

from typing import Any

import pytest

from controller.core.events import Event
from controller.rehearsal.rehearsal import FAULT_KEY, PREEMPTION, Check, Interruption, check_recovery


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


BEFORE = [launched(1), *steps(1, 2, 40), launched(2)]
RESTORED = [*steps(1, time=10), *steps(40, time=20)]
"""Lines that the program restores are not its steps."""


@pytest.mark.parametrize(
    ("events", "doubtful", "message"),
    [
        ([*BEFORE, *steps(31, 32)], False,
         "preempted (4 s after its first output): replaced, and the program resumed: 2 attempts; "
         "at step 31 of 100; step 40 was reached before"),
        ([*BEFORE, *steps(1, 2)], True,
         "started again: 2 attempts; from the beginning, at step 1 of 100: it loaded no checkpoint"),
        ([launched(1), *RESTORED, launched(2), *RESTORED, *steps(41, time=50)], False, "at step 41 of 100"),
        ([launched(1), said(), launched(2), said()], True, "reports no steps"),
        # a machine so busy that the first attempt's steps came late
        ([launched(1), said(), launched(2), *steps(3, 4)], True,
         "started again: 2 attempts; at step 3 of 100; no step arrived before the preemption to compare it with"),
    ],
)  # fmt: skip
def test_it_is_said_where_a_program_goes_on(events: list[Event], doubtful: bool, message: str) -> None:
    check = recovered(events)
    assert (check.passed, check.doubtful) == (True, doubtful)
    assert message in check.message


def test_a_preemption_outside_of_the_program_or_none_proves_nothing() -> None:
    [uninterrupted] = check_recovery({}, 1, tell([launched(1)], []))
    [ended] = check_recovery({f"{FAULT_KEY}/000": fault(1)}, 1, tell([launched(1), said()], []))
    outside = recovered([launched(1), said()], attempts=1)
    for check, message in (
        (outside, "nothing proven, because it struck while the program was not running"),
        (uninterrupted, "not interrupted: nothing proven"),
        (ended, "nothing proven, because the program ended before"),
    ):
        assert not check.passed
        assert message in check.message
    [check] = check_recovery({"r/000": fault(0, kind="stockout", times=1)}, 1, Interruption())
    assert (check.passed, check.message) == (True, "stockout (times 1): overcome"), "a fault of the user's"

"""Which attempt a launch continues, when the record does not say on which pod it was made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from controller.records.ledger import UNKNOWN_POD, Launch
from controller.run.launch import launch

POD = "pod-1"


class Ledger:
    def __init__(self, *launches: Launch) -> None:
        self.kept = list(launches)

    def launches(self) -> list[Launch]:
        return list(self.kept)

    def record_launch(self, launch: Launch) -> bool:
        self.kept.append(launch)
        return True


@pytest.mark.parametrize(
    ("pod", "state", "attempt", "was_running"),
    [
        (UNKNOWN_POD, "running", 1, True),
        (UNKNOWN_POD, "absent", 2, False),
        (POD, "running", 1, True),
        (POD, "absent", 1, False),
        ("pod-0", "running", 2, False),
    ],
)
def test_the_workers_say_where_a_launch_without_a_pod_was_made(
    pod: str, state: str, attempt: int, was_running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr("controller.run.launch._start", lambda *args: started.append(args[-1]))
    fleet: Any = SimpleNamespace(call_all=lambda *_: [{"state": state, "code": None}])
    parts: Any = SimpleNamespace(run_id="r-1", status=SimpleNamespace(uid=POD), now=lambda: 5.0)
    ledger: Any = Ledger(Launch(1, pod, 1.0))
    made, running = launch(parts, ledger, parts, fleet, parts, lambda: 7)
    assert (made.attempt, running) == (attempt, was_running)
    assert started == ([] if was_running else [attempt])

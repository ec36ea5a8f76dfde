"""Which attempt a launch continues, when the record does not say on which pod it was made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.records.ledger import UNKNOWN_POD, Launch
from controller.records.ledger import Ledger as RunLedger
from controller.run.launch import PEER_PORT, _start, launch

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
    ("kind", "wanted", "has_hook"), [("command", True, True), ("command", False, False), ("trainer", True, False)]
)
def test_each_worker_is_told_who_it_is_and_the_exit_hook_is_a_choice(kind: str, wanted: bool, has_hook: bool) -> None:
    sent: list[dict[str, Any]] = []
    fleet: Any = SimpleNamespace(call_all=lambda _, payloads: sent.extend(payloads) or [{} for _ in payloads])
    endpoints = [SimpleNamespace(internal=f"10.0.0.{2 + worker}") for worker in range(3)]
    node: Any = SimpleNamespace(status=SimpleNamespace(endpoints=endpoints))
    recovery = SimpleNamespace(exit_on_exception=wanted, lease_duration_seconds=60.0)
    config = SimpleNamespace(program=SimpleNamespace(kind=kind), recovery=recovery)
    plan: Any = SimpleNamespace(
        run_id="r-1", argv=["x"], config=config, notice=None, get=lambda _: SimpleNamespace(name="v"),
        snapshot=SimpleNamespace(sha256="c"), vault=SimpleNamespace(values=list),
        node=SimpleNamespace(spec=SimpleNamespace(workers=3)),
    )  # fmt: skip
    _start(plan, RunLedger(cast(Any, None), "b", "r-1"), node, fleet, 1)  # it asks Google nothing
    assert {(payload["successor"], payload["fence_seconds"]) for payload in sent} == {
        ("runs/r-1/launches/0002.json", 30.0)
    }
    assert [payload["exit_hook"] for payload in sent] == [has_hook] * 3
    for worker, payload in enumerate(sent):
        assert payload["env"] == {
            "SLIPWAY_WORKER": str(worker),
            "SLIPWAY_WORKERS": "3",
            "SLIPWAY_COORDINATOR": f"10.0.0.2:{PEER_PORT}",
        }


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

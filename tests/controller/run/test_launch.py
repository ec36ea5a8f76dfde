"""Which attempt a launch continues, when the record does not say on which pod it was made."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.samplers import POD_VARIABLE, attempt_token
from conf.schema.training.loop import GrpoLoop
from controller.core.clock import Clock
from controller.gcp.folder_store import FolderClient
from controller.records.ledger import UNKNOWN_POD, Launch, Ledger
from controller.run.launch import PEER_PORT, _start, launch, sampler_secrets
from controller.ssh.fleet import Fleet
from tests.groups import load_group

POD = "pod-1"


@pytest.mark.parametrize(
    ("kind", "wanted", "has_hook"), [("command", True, True), ("command", False, False), ("trainer", True, False)]
)
def test_each_worker_is_told_who_it_is_and_the_exit_hook_is_a_choice(kind: str, wanted: bool, has_hook: bool) -> None:
    sent: list[dict[str, Any]] = []
    fleet: Any = SimpleNamespace(call_all=lambda _, payloads: sent.extend(payloads) or [{} for _ in payloads])
    endpoints = [SimpleNamespace(internal=f"10.0.0.{2 + worker}") for worker in range(3)]
    node: Any = SimpleNamespace(status=SimpleNamespace(endpoints=endpoints))
    config = SimpleNamespace(
        recovery=SimpleNamespace(exit_on_exception=wanted, lease_duration_seconds=60.0),
        **{"program": SimpleNamespace(kind=kind), "loop": None, "env": SimpleNamespace(vars={})},
    )
    plan: Any = SimpleNamespace(
        run_id="r-1", argv=["x"], config=config, notice=None, get=lambda _: SimpleNamespace(name="v"),
        snapshot=SimpleNamespace(sha256="c"), vault=SimpleNamespace(values=dict),
        node=SimpleNamespace(spec=SimpleNamespace(workers=3)),
    )  # fmt: skip
    _start(plan, Ledger(cast(Any, None), "b", "r-1"), node, fleet, 1)  # it asks Google nothing
    [told] = {(payload["successor"], payload["fence_seconds"]) for payload in sent}
    assert told == ("runs/r-1/launches/0002.json", 30.0)
    assert [payload["exit_hook"] for payload in sent] == [has_hook] * 3
    shared = {"SLIPWAY_WORKERS": "3", "SLIPWAY_COORDINATOR": f"10.0.0.2:{PEER_PORT}"}
    assert [payload["env"] for payload in sent] == [{"SLIPWAY_WORKER": str(worker), **shared} for worker in range(3)]


@pytest.mark.parametrize(
    ("pod", "state", "attempt", "was_running"),
    [
        (UNKNOWN_POD, "running", 1, True),
        (UNKNOWN_POD, "absent", 2, False),
        (POD, "absent", 1, False),
        ("pod-0", "running", 2, False),
    ],
)
def test_the_workers_say_where_a_launch_without_a_pod_was_made(
    pod: str, state: str, attempt: int, was_running: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[int] = []
    monkeypatch.setattr("controller.run.launch._start", lambda *args: started.append(args[-1]))
    fleet: Any = SimpleNamespace(call_all=lambda *_: [{"state": state, "code": None}])
    parts: Any = SimpleNamespace(run_id="r-1", status=SimpleNamespace(uid=POD), now=lambda: 5.0)
    ledger = Ledger(FolderClient(Clock()), str(tmp_path), "r-1")
    ledger.record_launch(Launch(1, pod, 1.0))
    made, running = launch(parts, ledger, parts, fleet, parts, lambda: 7)
    assert (made.attempt, running) == (attempt, was_running)
    assert started == ([] if was_running else [attempt])


def test_samplers_share_a_secret_of_their_attempt_which_needs_the_key(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"key {name}")
    base = load_group("loop/grpo")

    def token(key: str, attempt: int, workers: int = 1, pods: int = 0, pod: str = "") -> dict[str, str]:
        sampler = base["sampler"] | {"workers": workers, "pods": pods}
        loop = GrpoLoop(**base | {"async_depth": 1, "sampler": sampler})
        env = SimpleNamespace(vars={POD_VARIABLE: pod} if pod else {})
        run_id = f"r-1-sampler-{pod}" if pod else "r-1"
        plan: Any = SimpleNamespace(run_id=run_id, config=SimpleNamespace(loop=loop, env=env))
        fleet = Fleet(cast(Any, SimpleNamespace(key=tmp_path / key)), links=())
        return sampler_secrets(plan, fleet, attempt)

    first = token("a", 1)
    assert first == token("a", 1)
    assert len(first["SLIPWAY_SAMPLER_TOKEN"]) == 64
    assert len({json.dumps(found) for found in (first, token("a", 2), token("b", 1))}) == 3
    assert token("a", 1, workers=0) == {}
    assert token("a", 1, workers=0, pods=2) == first
    on_pod = token("a", 5, workers=0, pod="1")
    assert on_pod == token("a", 1, workers=0, pod="2"), "it outlives attempts, its own as well"
    assert attempt_token(on_pod["SLIPWAY_SAMPLER_SECRET"], 1) == first["SLIPWAY_SAMPLER_TOKEN"]
    assert len(on_pod) == 1

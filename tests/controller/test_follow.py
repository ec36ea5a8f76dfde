"""How an attempt's end is told from what the workers' streams and the node say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest

from controller.clock import Clock
from controller.events import Event, Events
from controller.follow import Follower, Outcome
from controller.resource import Absent, Have, Pending
from controller.resources.node import Endpoint, Node
from controller.ssh import Fleet, WorkerError
from controller.world import World

NODE = Node(
    name="pod",
    zone="us-central1-a",
    workers=2,
    service_account="sa",
    max_create_attempts=1,
    create_seconds=1,
    accelerator_type="v4-16",
    runtime_version="r",
    capacity="spot",
    network="n",
    subnetwork="s",
    external_ip=True,
    uid="one",
    endpoints=(Endpoint(0, "10.0.0.2", None), Endpoint(1, "10.0.0.3", None)),
)


class FakeNode(Node):
    """A node that is seen as what the test says."""

    def observe(self, world: World, have: Have) -> Any:
        return SEEN[0]


SEEN: list[Any] = [NODE]


class FakeFleet:
    """Streams of canned lines; an exception in a list breaks the stream there, and the next list follows."""

    def __init__(self, *streams: list[list[Any]]) -> None:
        self.streams = streams
        self.asked: list[tuple[int, dict[str, Any]]] = []
        self.stopped = threading.Event()

    def stream(self, worker: int, command: str, payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.asked.append((worker, payload))
        parts = self.streams[worker]
        for line in parts.pop(0) if len(parts) > 1 else parts[0]:
            if isinstance(line, Exception):
                raise line
            if line == "hang":
                self.stopped.wait(30)
                continue
            yield line

    def call_all(self, command: str, payload: dict[str, Any]) -> list[Any]:
        assert command == "stop"
        self.stopped.set()
        return [{}, {}]


def end(code: int | None, ended: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "end": {"code": code, "signal": None, "ended": ended, "log_tail": "", "summary": None, "error": None} | more
    }


def follow(fleet: FakeFleet, seen: Any = NODE) -> tuple[Outcome, list[Event]]:
    SEEN[0] = seen
    clock = Clock()
    world = World("p", cast(Any, None), clock, Events(clock), Path("unused"), "me", 0.01, cast(Any, None))
    events: list[Event] = []
    world.events.listen(events.append)
    node = FakeNode(**{f.name: getattr(NODE, f.name) for f in fields(NODE)})
    outcome = Follower(world, node, cast(Fleet, fleet), "run", 1, 0.05).follow()
    assert outcome is not None
    return outcome, events


def test_all_zero_is_finished() -> None:
    outcome, events = follow(FakeFleet([[{"metrics": {"step": 1, "kind": "x"}, "offset": 9}, end(0)]], [[end(0)]]))
    assert outcome.kind == "finished"
    assert [e.data["metrics"] for e in events if e.kind == "metrics"] == [{"step": 1, "kind": "x"}]


def test_the_first_failure_is_by_the_workers_clocks() -> None:
    outcome, _ = follow(FakeFleet([[end(1, ended=5.0)]], [[end(7, ended=3.0)]]))
    assert outcome.kind == "failed"
    assert outcome.first_failure is not None
    assert outcome.first_failure[0] == 1


def test_one_failure_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.follow.STRAGGLER_SECONDS", 0.05)
    fleet = FakeFleet([[end(7, ended=3.0)]], [["hang", end(None, ended=9.0, signal="SIGTERM")]])
    outcome, _ = follow(fleet)
    assert fleet.stopped.is_set()
    assert outcome.first_failure is not None
    assert outcome.first_failure[0] == 0


def test_a_broken_stream_is_taken_up_where_it_stopped() -> None:
    broken = WorkerError(0, "10.0.0.2", "dropped", "the connection broke off")
    first: list[Any] = [{"log": "a", "offset": 4}, {"metrics": {"step": 1}, "offset": 9}, broken]
    fleet = FakeFleet([first, [{"log": "b", "offset": 8}, end(0)]], [[end(0)]])
    outcome, events = follow(fleet)
    assert outcome.kind == "finished"
    resumed = [payload for worker, payload in fleet.asked if worker == 0][1]
    assert (resumed["log_offset"], resumed["metrics_offset"]) == (4, 9)
    assert [e.words for e in events if e.kind == "log"] == ["a", "b"]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Absent(), "the node is gone"),
        (Pending("deleting"), "the node is deleting"),
        (replace(NODE, state="PREEMPTED"), "the node is preempted"),
        (replace(NODE, uid="two"), "the node was replaced"),
    ],
)
def test_a_node_that_is_lost_is_a_preemption_and_no_failure(seen: Any, words: str) -> None:
    outcome, _ = follow(FakeFleet([[end(None, signal="SIGKILL")]], [["hang", end(1)]]), seen)
    assert (outcome.kind, outcome.words) == ("preempted", words)

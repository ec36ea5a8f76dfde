"""How an attempt's end is told from what the workers' streams and the node say."""

import itertools
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import LeaseLostError
from controller.core.events import Event
from controller.core.this_process import Clock
from controller.gcp.google_errors import GoogleError
from controller.recovery.responses import AttemptOutcome, VerdictKind
from controller.resources.pod.node import Node
from controller.resources.pod.provisioner import Endpoint, Place, PodStatus, SliceSpec, SliceStatus
from controller.run import follow as module
from controller.run.follow import Follower, hang_limit
from controller.ssh.fleet import Fleet, WorkerError
from tests.controller.recovery.test_recover import recovery
from tests.fakes.context import make_context

SPEC = SliceSpec(workers=2, accelerator_type="v4-16", runtime_version="r", network="n", external_ip=True)
PLACE = Place("us-central1-a", "spot", "s")
ENDPOINTS = (Endpoint(0, "10.0.0.2", None), Endpoint(1, "10.0.0.3", None))
STATUS = SliceStatus(spec=SPEC, place=PLACE, state="READY", uid="one", endpoints=ENDPOINTS)
NODE = Node(name="pod", spec=SPEC, places=(PLACE,), max_create_attempts=1, create_seconds=1, status=STATUS)
READY = PodStatus()
RAISED = 'Traceback (most recent call last):\n  File "/w/d.py", line 7, in f\n    x\nKeyError: 1\n'
SEEN: list[Any] = [READY]


def pod_seen(*_: object, **__: object) -> PodStatus:
    if isinstance(SEEN[0], Exception):
        raise SEEN[0]
    return SEEN[0]


class FakeFleet:
    """Streams of canned lines; an exception in a list breaks the stream there, and the next list follows."""

    def __init__(self, *streams: list[list[Any]]) -> None:
        self.streams = streams
        self.asked: list[tuple[int, dict[str, Any]]] = []
        self.stopped, self.forgotten = threading.Event(), threading.Event()
        self.told_to_stop: list[int] = []

    def stream(self, worker: int, command: str, payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.asked.append((worker, payload))
        parts = self.streams[worker]
        for line in parts.pop(0) if len(parts) > 1 else parts[0]:
            if isinstance(line, Exception):
                raise line
            if line == "hang":
                self.stopped.wait(240)
            elif line == "pause":
                self.stopped.wait(0.05)
            elif line == "hang for good":
                self.forgotten.wait(240)
            else:
                yield line

    def call_all(self, command: str, payload: dict[str, Any], workers: list[int]) -> list[Any]:
        assert command == "stop"
        self.told_to_stop = workers
        self.stopped.set()
        return [{} for _ in workers]


def end(code: int | None, ended: float = 1.0, **more: Any) -> dict[str, Any]:
    plain = {"code": code, "signal": None, "ended": ended, "log_tail": "", "summary": None, "error": None}
    return {"end": plain | more}


def follow(fleet: FakeFleet, seen: Any = READY, **settings: Any) -> tuple[AttemptOutcome, list[Event]]:
    """Follow an attempt on a node that is seen as `seen`, unless a test sets it otherwise meanwhile."""
    SEEN[0] = seen
    context, events = make_context(None, clock=Clock()), list[Event]()
    hooks: dict[str, Any] = settings.pop("hooks", {})
    cancelled = settings.pop("cancelled", lambda: False)
    context.events.add_listener(events.append)
    policy = recovery().model_copy(update=settings)
    watched = Follower(context, NODE, cast(Fleet, fleet), "run", 1, policy, 0.05, is_cancelled=cancelled, **hooks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "pod_seen", pod_seen)
        outcome = watched.follow()
    assert outcome is not None
    return outcome, events


def test_a_run_that_ended_well_is_finished_though_its_pod_is_taken_away_before_the_last_log() -> None:
    exited = {"exited": end(0, summary={"loss": 1})["end"]}
    outcome, _ = follow(FakeFleet([[exited, "hang for good"]], [[end(0)]]), PodStatus("PREEMPTED"))
    assert outcome.verdict.kind is VerdictKind.FINISHED
    assert dict(outcome.ends)[0]["summary"] == {"loss": 1}


def test_the_first_failure_is_by_the_workers_clocks() -> None:
    outcome, _ = follow(FakeFleet([[end(1, ended=5.0)]], [[end(7, ended=3.0)]]))
    assert (outcome.verdict.kind, outcome.verdict.worker) == (VerdictKind.PROGRAM_ERROR, 1)


@pytest.mark.parametrize("off", [0.0, 7200.0, -7200.0])
def test_the_first_failure_is_told_though_each_clock_is_wrong_in_its_own_way(off: float) -> None:
    """Worker 0 lost worker 1, which ended two seconds before it."""
    lost = "The tasks have crashed: heartbeat timeout"
    first = end(1, ended=1e9 + 5.0, log_tail=lost) | {"now": 1e9 + 6.0}
    second = end(7, ended=1e9 + off + 3.0) | {"now": 1e9 + off + 6.0}
    outcome, _ = follow(FakeFleet([[first]], [[second]]))
    assert (outcome.verdict.kind, outcome.verdict.worker) == (VerdictKind.PROGRAM_ERROR, 1)


def test_an_end_counts_before_its_log_is_uploaded_and_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.run.follow.STRAGGLER_SECONDS", 0.05)
    exited = {"exited": end(None, ended=3.0, signal="SIGKILL")["end"]}
    first = [exited, "hang", end(None, ended=3.0, signal="SIGKILL")]
    fleet = FakeFleet([first], [["hang", end(None, signal="SIGTERM")]])
    outcome, _ = follow(fleet)
    assert fleet.told_to_stop == [1]
    assert (outcome.verdict.kind, outcome.verdict.worker) == (VerdictKind.WORKER_LOST, 0)
    assert sorted(worker for worker, _ in outcome.ends) == [0, 1]


def test_a_broken_stream_is_taken_up_where_it_stopped() -> None:
    broken = WorkerError(0, "10.0.0.2", "dropped", "the connection was lost")
    first: list[Any] = [{"log": "a", "offset": 4}, {"metrics": {"step": 1}, "offset": 9}, broken]
    fleet = FakeFleet([first, [{"log": "b", "offset": 8}, end(0)]], [[end(0)]])
    outcome, events = follow(fleet)
    assert (outcome.verdict.kind, outcome.step) == (VerdictKind.FINISHED, 1)
    assert [e.data["metrics"] for e in events if e.kind == "metrics"] == [{"step": 1}]
    resumed = [payload for worker, payload in fleet.asked if worker == 0][1]
    assert (resumed["log_offset"], resumed["metrics_offset"]) == (4, 9)
    assert [e.message for e in events if e.kind == "log"] == ["a", "b"]
    assert [e.message for e in events if e.kind == "note"] == ["worker 0 (10.0.0.2): the connection was lost"]


@pytest.mark.parametrize(
    ("seen", "words"), [(PodStatus("ABSENT"), "the node is gone"), (PodStatus(replaced=True), "the node was replaced")]
)
def test_a_node_that_is_lost_is_a_preemption_and_no_failure(seen: PodStatus, words: str) -> None:
    outcome, _ = follow(FakeFleet([[end(None, signal="SIGKILL")]], [["hang", end(1)]]), seen)
    assert (outcome.verdict.kind, outcome.verdict.summary) == (VerdictKind.PREEMPTED, words)


def test_a_preemption_that_was_announced_counts_once_all_have_saved() -> None:
    told: list[Any] = [{"notice": "preemption"}]
    fleet = FakeFleet([[*told, end(75, ended=3.0)]], [[*told, "pause", "pause", end(75, ended=3.1)]])
    outcome, events = follow(fleet)
    assert (outcome.verdict.kind, outcome.verdict.from_notice) == (VerdictKind.PREEMPTED, True)
    assert fleet.told_to_stop == []
    assert [worker for worker, _ in outcome.ends] == [0, 1]
    assert len([e for e in events if e.kind == "note" and e.message == "worker 0 received a preemption notice"]) == 1


def test_what_was_ended_on_purpose_is_cancelled() -> None:
    stopped = [end(None, signal="SIGTERM")]
    outcome, _ = follow(FakeFleet([stopped], [stopped]), cancelled=lambda: True)
    assert outcome.verdict.kind is VerdictKind.CANCELLED


def test_a_worker_that_falls_silent_is_lost_and_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.run.follow.STRAGGLER_SECONDS", 0.0)
    speaks: list[Any] = [{"heartbeat": 1.0}, "pause"] * 400
    fleet = FakeFleet([[*speaks, end(None, signal="SIGTERM")]], [["hang for good"]])
    outcome, _ = follow(fleet, heartbeat_timeout_seconds=0.2)
    assert (outcome.verdict.kind, outcome.verdict.unreachable) == (VerdictKind.WORKER_LOST, (1,))
    assert fleet.told_to_stop == [0]


def test_a_stopped_program_is_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.recovery.diagnosis.STOPPED_SECONDS", 0.1)
    stopped: list[Any] = [{"heartbeat": 1.0, "stopped": True}, "pause"] * 400
    outcome, _ = follow(FakeFleet([stopped], [["hang for good"]]))
    assert (outcome.verdict.kind, outcome.verdict.worker) == (VerdictKind.HUNG, 0)


def test_silence_after_an_exception_in_a_thread_is_an_error_of_that_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.run.follow.STRAGGLER_SECONDS", 0.0)
    log = f"Exception in thread loader:\n{RAISED}"
    alive: list[Any] = [{"heartbeat": 1.0}, "pause"] * 400
    stopped = end(None, signal="SIGTERM", log_tail=log)
    fleet = FakeFleet([[*alive, stopped]], [[{"log": log, "offset": 9}, *alive, stopped]])
    outcome, _ = follow(fleet, hang_timeout_seconds=0.3)
    assert (outcome.verdict.kind, outcome.verdict.worker) == (VerdictKind.PROGRAM_ERROR, 1)
    assert outcome.verdict.evidence[1] == "KeyError: 1 (d.py:7)"
    assert not outcome.verdict.ended
    assert fleet.told_to_stop == [0, 1]


def test_an_exception_of_any_worker_is_shown_live_and_its_silence_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.recovery.watches.SILENT_SECONDS", 0.1)
    alive: list[Any] = [{"heartbeat": 1.0}, "pause"] * 8
    second = [{"log": RAISED, "offset": 9}, *alive, end(1, ended=8.0, log_tail=RAISED)]
    fleet = FakeFleet([[*alive, end(1, ended=9.0)]], [second])
    outcome, events = follow(fleet)
    [shown] = [event for event in events if event.kind == "traceback"]
    assert (shown.data["worker"], shown.data["exception"]) == (1, "KeyError: 1 (d.py:7)")
    said = [event.message for event in events if event.kind == "note"]
    assert "worker 1 has been silent since KeyError: 1 (d.py:7); its program has not ended" in said
    assert (outcome.verdict.kind, outcome.verdict.worker) == (VerdictKind.PROGRAM_ERROR, 1)


def test_nobody_waits_for_a_stopped_program_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers died of its silence, which is no cause: they say that they lost somebody."""
    monkeypatch.setattr("controller.run.follow.ROOT_CAUSE_SECONDS", 1e9)
    lost = end(1, ended=3.0, log_tail="The tasks have crashed: heartbeat timeout")
    fleet = FakeFleet([[lost]], [[{"heartbeat": 1.0, "stopped": True}, "hang", end(None, signal="SIGKILL")]])
    outcome, _ = follow(fleet)
    assert fleet.told_to_stop == [1]
    assert [worker for worker, _ in outcome.ends] == [0, 1]


def test_while_nothing_is_reachable_it_is_waited_for() -> None:
    """Never taken for a preemption, nor for a failure of the workers."""
    broken = WorkerError(0, "10.0.0.2", "timeout", "no answer")
    down, up = threading.Event(), threading.Event()

    class Restored(FakeFleet):
        def stream(self, worker: int, command: str, payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
            if not up.is_set():
                if not down.is_set():
                    threading.Timer(0.2, lambda: (SEEN.__setitem__(0, READY), up.set())).start()
                down.set()
                raise broken
            yield end(0)

    outcome, events = follow(Restored([], []), GoogleError("tpu", 503, "UNREACHABLE", "no route"))
    assert outcome.verdict.kind is VerdictKind.FINISHED
    notes = [e.message for e in events if e.kind == "note"]
    assert any(re.match(r"network lost: Google's API does not respond.*waiting$", note) for note in notes), notes


def test_silence_counts_from_the_end_of_maintenance() -> None:
    """Workers that come back one after the other are not lost because nobody could answer for ten minutes."""

    class SetClock(Clock):
        at = 0.0

        def monotonic(self) -> float:
            return self.at

    clock, seen = SetClock(), [PodStatus("REPAIRING")]
    policy = recovery().model_copy(update={"heartbeat_timeout_seconds": 60.0, "hang_timeout_seconds": 60.0})
    context = make_context(None, clock=clock)
    watched = Follower(
        context, NODE, cast(Fleet, FakeFleet([[]], [[]])), "run", 1, policy, 0.05, is_cancelled=lambda: False
    )
    streams = [module._Stream(0, 0, last_heard=0.0, opened=0.0) for _ in ENDPOINTS]
    pod: Any = SimpleNamespace(error=None, api_up_since=0.0, latest=lambda: seen[0])
    steps = module.StepTracker(last_activity=0.0)

    def told(at: float) -> VerdictKind:
        clock.at = at
        verdict = watched._diagnose(streams, pod, steps)
        assert watched._should_wait(verdict) == (verdict.kind is VerdictKind.MAINTENANCE)
        return verdict.kind

    assert told(600.0) is VerdictKind.MAINTENANCE
    seen[0] = READY
    streams[0].last_heard = 600.5
    assert told(601.0) is VerdictKind.RUNNING
    streams[0].last_heard = steps.last_activity = 660.0
    assert told(661.0) is VerdictKind.WORKER_LOST  # now it has had a minute


def test_what_google_refuses_for_good_is_told() -> None:
    with pytest.raises(GoogleError, match="may not"):
        follow(FakeFleet([["hang for good"]], [["hang for good"]]), GoogleError("tpu", 403, "FORBIDDEN", "may not"))


def test_a_worker_that_floods_is_slowed_down_and_starves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines wait in its connection, not in this machine's memory, and the end of another worker is seen."""
    for name in ("STRAGGLER_SECONDS", "ROOT_CAUSE_SECONDS", "STOP_SECONDS"):
        monkeypatch.setattr(module, name, 0.0)
    sent = 0

    def flood() -> Iterator[dict[str, Any]]:
        nonlocal sent
        for sent in itertools.count(1):
            yield {"log": "x", "offset": sent}

    fleet = FakeFleet([[end(1)]], [cast(Any, flood())])
    outcome, events = follow(fleet)
    assert outcome.verdict.kind is VerdictKind.PROGRAM_ERROR
    shown = sum(event.kind == "log" for event in events)
    assert sent - shown <= module.QUEUED_LINES + 2


@pytest.mark.parametrize("what", ["budget", "lease"])
def test_a_flood_delays_neither_budget_nor_lease(what: str) -> None:
    """Both are looked at after so many lines, however many more there are."""
    looks, sent = itertools.count(1), itertools.count(1)

    def is_over() -> bool:
        return next(looks) > 3

    def lose() -> None:
        if is_over():
            raise LeaseLostError("taken over")

    flood = cast(Any, ({"log": "x", "offset": number} for number in sent))
    fleet = FakeFleet([flood], [["hang for good"]])
    if what == "budget":
        outcome, events = follow(fleet, hooks={"budget_exceeded": lambda: "it is spent" if is_over() else ""})
        assert outcome.verdict.kind is VerdictKind.OVER_BUDGET
        assert sum(event.kind == "log" for event in events) <= 4 * module.LINES_AT_ONCE
    else:
        with pytest.raises(LeaseLostError):
            follow(fleet, hooks={"on_tick": lose})
    assert next(sent) <= 4 * module.LINES_AT_ONCE + module.QUEUED_LINES + 3


def test_a_worker_that_answers_garbage_is_lost_with_its_words() -> None:
    said = "`watch` answered with something else than Slipway's agent does: the answer.offset is str"
    fleet = FakeFleet([["hang"]], [[WorkerError(1, "10.0.0.3", "agent", said)]])
    outcome, events = follow(fleet, heartbeat_timeout_seconds=0.2)
    assert outcome.verdict.kind is VerdictKind.WORKER_LOST
    assert said in " ".join(outcome.verdict.evidence)
    assert [event.message for event in events].count(f"worker 1 (10.0.0.3): {said}") == 1


@pytest.mark.parametrize(
    ("setting", "intervals", "seconds"),
    [(None, [], None), (None, [1.0] * 2, None), (None, [1.0] * 3, 900.0), (None, [120.0] * 3, 1200.0), (9.0, [], 9.0)],
)
def test_what_a_hang_is_follows_from_the_steps(setting: float | None, intervals: list[float], seconds: float) -> None:
    assert hang_limit(setting, intervals) == seconds

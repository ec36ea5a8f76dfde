"""What a controller does about another run on its pod, about its run on another one, and what it launches."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.formats import POD_VARIABLE, attempt_token
from conf.schema.cloud import HereCloud
from conf.schema.training.loop import GrpoLoop
from controller.core.errors import ConfigError, LeaseLostError
from controller.core.this_process import Clock
from controller.gcp.folder_store import FolderClient
from controller.gcp.google_errors import GoogleError
from controller.lease import LeaseHeldError
from controller.lease_store import Identity, LeaseRecord, LeaseSnapshot
from controller.records.ledger import UNKNOWN_POD, Launch, Ledger
from controller.resources.machines import Watchdog
from controller.run import attempt
from controller.run.attempt import GRACE_SECONDS, LEAST_SECONDS, AttemptRunner, BudgetDeadline
from controller.run.drive import RunDriver
from controller.run.launch import PEER_PORT, _start, launch, sampler_secrets
from controller.run.standby import LeaderGaveUpError, RemoteStandby, StandbyOutcome
from controller.ssh.fleet import Fleet, WorkerError
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context
from tests.groups import load_group


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


POD = "pod-1"


@pytest.mark.parametrize(
    ("kind", "wanted", "has_hook"), [("command", True, True), ("command", False, False), ("trainer", True, False)]
)
def test_each_worker_is_told_who_it_is_and_the_exit_hook_is_a_choice(
    kind: str, wanted: bool, has_hook: bool, tmp_path: Path
) -> None:
    (tmp_path / "runs/r-1").mkdir(parents=True)
    (tmp_path / "runs/r-1/told.jsonl").write_text('{"step": 1}\n')
    sent: list[dict[str, Any]] = []
    fleet: Any = SimpleNamespace(call_all=lambda _, payloads: sent.extend(payloads) or [{} for _ in payloads])
    endpoints = [SimpleNamespace(internal=f"10.0.0.{2 + worker}") for worker in range(3)]
    node: Any = SimpleNamespace(status=SimpleNamespace(endpoints=endpoints))
    config = SimpleNamespace(
        recovery=SimpleNamespace(exit_on_exception=wanted, lease_duration_seconds=60.0),
        **{
            "program": SimpleNamespace(kind=kind, command=("x",)),
            "loop": None,
            "env": SimpleNamespace(vars={}),
            "cloud": None,
        },
        run=SimpleNamespace(state_dir=str(tmp_path)),
        logging=SimpleNamespace(all_trackers=("tensorboard", "my_own:Tracker"), wandb=None),
    )
    plan: Any = SimpleNamespace(
        run_id="r-1", argv=["x"], config=config, notice=None,
        get=lambda _: SimpleNamespace(name="v", text="{name: e, dir: gs://b}"),
        snapshot=SimpleNamespace(sha256="c"), vault=SimpleNamespace(values=dict),
        node=SimpleNamespace(spec=SimpleNamespace(workers=3)),
    )  # fmt: skip
    _start(plan, Ledger(cast(Any, None), "b", "r-1"), node, fleet, 1)  # it asks Google nothing
    [told] = {(payload["successor"], payload["fence_seconds"]) for payload in sent}
    assert told == ("runs/r-1/launches/0002.json", 30.0)
    assert [payload["exit_hook"] for payload in sent] == [has_hook] * 3
    own = {"config": {"name": "e", **({"command": ["x"]} if kind == "command" else {})}, "settings": {}}
    own["earlier"] = '{"step": 1}\n'
    trackers = [{"use": name, "by_phase": kind == "command", **own} for name in config.logging.all_trackers]
    assert [payload["trackers"] for payload in sent] == [trackers if kind == "command" else trackers[1:], [], []]
    shared = {"SLIPWAY_WORKERS": "3", "SLIPWAY_COORDINATOR": f"10.0.0.2:{PEER_PORT}"}
    assert [payload["env"] for payload in sent] == [{"SLIPWAY_WORKER": str(worker), **shared} for worker in range(3)]
    shared = {"JAX_COORDINATOR_ADDRESS": "10.0.0.2:8482", "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3,10.0.0.4"}
    assert [payload["defaults"] for payload in sent] == [{"TPU_WORKER_ID": str(i), **shared} for i in range(3)]
    sent.clear()
    config.cloud = HereCloud.model_construct()
    _start(plan, Ledger(cast(Any, None), "b", "r-1"), node, fleet, 1)
    assert [payload["defaults"] for payload in sent] == [{}] * 3, "this machine is no part of a slice"


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


class Run:
    """A run with a watchdog that notes its orders, in hours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pods: int, hours: float | None) -> None:
        self.clock, self.hours, self.orders, self.notes = ManualClock(), hours, list[float | None](), list[str]()
        self.error: Exception | None = None
        monkeypatch.setattr(Watchdog, "update_limits", lambda watchdog, context, node, left: self.order(left))
        watchdog = Watchdog(name="pod", node="node/pod", bucket="b", idle_seconds=None)
        self.context = make_context(None, clock=self.clock, notes=self.notes)
        spending = SimpleNamespace(hours_left=lambda: self.hours, account=SimpleNamespace(pods=pods))
        monkeypatch.setattr(attempt, "write_limit", lambda *_: self.limits.append(_[-1]))
        plan = SimpleNamespace(resources=(watchdog,), bucket="b", run_id="q-1")
        node, self.limits = SimpleNamespace(id="node/pod"), list[float | None]()
        self.deadline = BudgetDeadline(cast(Any, plan), self.context, cast(Any, spending), cast(Any, node))
        self.deadline.send()

    def order(self, left: float | None) -> None:
        if self.error is not None:
            raise self.error
        self.orders.append(left if left is None else left / 3600)

    def at(self, hours: float) -> list[float | None]:
        """Return the orders so far, after a look at this time."""
        self.clock.elapsed = 3600 * hours
        self.deadline.send_if_due()
        return self.orders


def test_the_limit_is_on_record_for_orphans_and_no_error_of_the_bucket_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Run(monkeypatch, pods=1, hours=None).limits == [None]
    run = Run(monkeypatch, pods=1, hours=10.0)
    assert run.limits == [10 * 3600.0 + GRACE_SECONDS]

    def refuse(*_: Any) -> None:
        raise GoogleError("storage objects.insert", 503, "UNAVAILABLE", "no")

    monkeypatch.setattr(attempt, "write_limit", refuse)
    assert run.deadline.send_again()
    assert len(run.orders) == 2
    assert "`slipway orphans` does not know the pod's limit" in run.notes[-1]
    run.hours = 0.0
    assert not run.deadline.send_again()
    assert len(run.orders) == 2, "the controller ends the run"


def with_grace(*hours: float) -> Any:
    return pytest.approx([each + GRACE_SECONDS / 3600 for each in hours])


def test_with_one_pod_the_first_deadline_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, pods=1, hours=10.0)
    assert run.at(9.9) == with_grace(10.0)
    assert Run(monkeypatch, pods=2, hours=None).at(1000.0) == [None]
    assert Run(monkeypatch, pods=1, hours=0.1).orders == pytest.approx([0.11]), "a short budget has a short grace"


def test_with_several_it_is_computed_again_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, pods=2, hours=10.0)
    assert run.at(4.9) == with_grace(10.0)
    run.hours = 7.5  # one of the two was not rented
    assert run.at(5.0) == with_grace(10.0, 7.5)
    assert run.at(8.7) == with_grace(10.0, 7.5)
    run.hours = 4.0
    assert run.at(8.75) == with_grace(10.0, 7.5, 4.0), "the grace is that of the whole budget"


def test_a_deadline_that_does_not_move_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pods are rented; an order of no time would delete them while the controller ends the run in order."""
    run = Run(monkeypatch, pods=2, hours=10.0)
    for now in (5.0, 7.5, 9.0, 9.95):
        run.hours = 10.0 - now
        assert run.at(now) == with_grace(10.0)
    run.hours = 2.0
    assert run.at(9.98) == with_grace(10.0, 2.0)
    spent = Run(monkeypatch, pods=2, hours=1.0)
    spent.hours = 0.0
    assert spent.at(0.6) == spent.at(2.0) == with_grace(1.0)


def test_a_worker_that_does_not_answer_keeps_its_deadline_and_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, pods=3, hours=2.0)
    run.error = WorkerError(0, "10.0.0.2", "timeout", "no route")
    run.hours = 1.5
    assert run.at(1.0) == with_grace(2.0)
    assert "the watchdog keeps its deadline for now: " in run.notes[-1]
    run.error = None
    assert run.at(1.0 + LEAST_SECONDS / 3600 - 1e-6) == with_grace(2.0)
    assert run.at(1.0 + LEAST_SECONDS / 3600) == with_grace(2.0, 1.5)


def test_a_controller_that_has_lost_its_lease_sends_nothing_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It slept while another one took the pod over."""
    run = Run(monkeypatch, pods=2, hours=2.0)

    def lost() -> int:
        raise LeaseLostError("taken over")

    run.context.before_pod_write = lost
    with pytest.raises(LeaseLostError):
        run.at(1.5)
    assert run.orders == with_grace(2.0)

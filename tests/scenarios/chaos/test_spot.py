"""A day on a simulated spot market, driven by the real `up`: most of what is paid for goes into steps that count.

Slipway's own `up`, recovery, response, verdict, search, reconciler, ledger and account run on a manual clock against a
simulated Google; only how the program is followed and how workers are set up are stood in for. Commit 20fcd3c0 has the
days of many places and of a script's retry loop, for docs/performance.md and docs/capacity.md.
"""

import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from controller.config.compose import compose
from controller.context import Context
from controller.core.events import Event, Events
from controller.core.this_process import iso_timestamp
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ConflictError, NotFoundError
from controller.plan.build import Plan, build_plan
from controller.reconcile import Absent, Diff, ObservedResources
from controller.records.ledger import Ledger
from controller.recovery.diagnosis import diagnose
from controller.recovery.responses import AttemptOutcome, Observation, WorkerStatus
from controller.resources.pod.node import Node
from controller.resources.software import Venv
from controller.run import attempt, drive
from controller.run.options import RunOptions
from controller.ssh.agent_link import WorkerError
from controller.ssh.fleet import WorkersFailedError
from tests.fakes.clock import NEVER, ManualClock

EPOCH = 1_790_000_000.0
DAY_SECONDS, LOSSES_PER_SECOND = 24 * 3600.0, 1 / (40 * 60)
DROUGHT_CHANCE, LONGEST_DROUGHT = 0.1, 3 * 3600.0
CREATE, DELETE, SETUP, START, CHECKPOINT = 120.0, 30.0, 75.0, 45.0, 120.0
"""Seconds that things take. SETUP: from READY until the program is told to start (wheels of the lock file by uv, all
workers at once); START: until its first new step (imports, restoring, programs that the bucket has compiled)."""
WORDS = (
    "cloud=gcp", "cloud.project=a-project", "tpu=v5litepod_16", "program=command", "program.command=[train]",
    "recovery.max_preemptions=1000",
)  # fmt: skip


class Over(BaseException):
    """The day has come to its end. Nothing on the way may swallow it."""


class DayClock(ManualClock):
    def sleep(self, seconds: float) -> None:
        self.until(self.elapsed + seconds)

    def until(self, elapsed: float) -> None:
        """Raises Over at the end."""
        self.elapsed = max(self.elapsed, min(elapsed, DAY_SECONDS))
        if elapsed >= DAY_SECONDS:
            raise Over


@dataclass(frozen=True)
class Market:
    """Moments at which whoever has a pod loses it, and spans without capacity; seconds since the beginning."""

    losses: tuple[float, ...]
    droughts: tuple[tuple[float, float], ...]

    def next_loss(self, time: float) -> float:
        return next((loss for loss in self.losses if loss > time), NEVER)

    def room_from(self, time: float) -> float:
        """The first moment, not before `time`, at which there is capacity."""
        return next((end for begin, end in self.droughts if begin <= time < end), time)


def draw_market(seed: int) -> Market:
    """Losses come as a Poisson process; each begins a drought with a chance, uniform up to the longest."""
    draw, time = random.Random(seed), 0.0
    losses: list[float] = []
    droughts: list[tuple[float, float]] = []
    while (time := time + draw.expovariate(LOSSES_PER_SECOND)) < DAY_SECONDS:
        losses.append(time)
        if draw.random() < DROUGHT_CHANCE:
            droughts.append((time, time + draw.uniform(0, LONGEST_DROUGHT)))
    return Market(tuple(losses), tuple(droughts))


@dataclass
class Pod:
    """One request in Google's queue, and the node that comes of it."""

    body: dict[str, Any]
    asked: float
    room: float
    lost: float
    deleted: float = NEVER
    set_up: bool = False
    started: set[int] = field(default_factory=set)

    @property
    def ready(self) -> float:
        return self.room + CREATE

    def state(self, now: float) -> str:
        if now < self.room:
            return "WAITING_FOR_RESOURCES"
        return "CREATING" if now < self.ready else "READY" if now < self.lost else "PREEMPTED"


class Google:
    """Queued resources and nodes on a market, and a bucket; in the place of `controller.gcp.client.Google`."""

    find = GoogleClient.find
    objects = GoogleClient.objects
    read = GoogleClient.read

    def __init__(self, market: Market) -> None:
        self.market, self.clock = market, DayClock(EPOCH)
        self.stored: dict[str, bytes] = {}
        self.pods: list[Pod] = []

    @property
    def pod(self) -> Pod | None:
        return next((pod for pod in self.pods if pod.deleted == NEVER), None)

    def paid(self) -> float:
        """Seconds of all pods from READY until they were lost or deleted."""
        return sum(max(0.0, min(self.clock.elapsed, pod.lost, pod.deleted) - pod.ready) for pod in self.pods)

    def root(self, api: str) -> str:
        return f"https://{api}.googleapis.com/"

    def call(self, api: str, method: str, **given: Any) -> dict[str, Any]:
        match method.rpartition("projects.locations.")[2] or method:
            case "queuedResources.get":
                return self._queued(given["name"])
            case "nodes.get":
                return self._node(given["name"])
            case "queuedResources.create":
                now = self.clock.elapsed
                room = self.market.room_from(now)
                self.pods.append(Pod(given["body"], now, room, self.market.next_loss(room + CREATE)))
                return {"name": "operation", "done": True}
            case "queuedResources.delete":
                self._there(given["name"]).deleted = self.clock.elapsed
                self.clock.sleep(DELETE)
                return {"name": "operation", "done": True}
            case "objects.list":
                return self._list(given["prefix"], given.get("delimiter", ""))
        raise AssertionError(f"this cloud knows no {api} {method}")

    def list_all(self, api: str, method: str, items: str, **given: Any) -> Iterator[dict[str, Any]]:
        yield from self.call(api, method, **given)[items]

    def download(self, bucket: str, name: str) -> bytes:
        if name not in self.stored:
            raise NotFoundError("storage objects.get", 404, "notFound", name)
        return self.stored[name]

    def upload(self, bucket: str, name: str, content: bytes, *, generation: int | None = None) -> dict[str, Any]:
        if generation == 0 and name in self.stored:
            raise ConflictError("storage objects.insert", 412, "conditionNotMet", name)
        self.stored[name] = content
        return {"name": name}

    def _list(self, prefix: str, delimiter: str) -> dict[str, Any]:
        names = sorted(name for name in self.stored if name.startswith(prefix))
        rest = [name.removeprefix(prefix) for name in names]
        folders = {part.partition(delimiter)[0] for part in rest if delimiter and delimiter in part}
        updated = iso_timestamp(self.clock.now())
        return {
            "items": [{"name": name, "updated": updated} for name in names],
            "prefixes": sorted(f"{prefix}{folder}{delimiter}" for folder in folders),
        }

    def _there(self, name: str) -> Pod:
        if self.pod is None:
            raise NotFoundError("tpu", 404, "NOT_FOUND", name)
        return self.pod

    def _queued(self, name: str) -> dict[str, Any]:
        pod = self._there(name)
        node = pod.state(self.clock.elapsed)
        state = {"READY": "ACTIVE", "CREATING": "PROVISIONING", "PREEMPTED": "SUSPENDED"}.get(node, node)
        return {**pod.body, "name": name, "state": {"state": state}, "createTime": iso_timestamp(EPOCH + pod.asked)}

    def _node(self, name: str) -> dict[str, Any]:
        pod = self._there(name)
        if (state := pod.state(self.clock.elapsed)) == "WAITING_FOR_RESOURCES":
            raise NotFoundError("tpu", 404, "NOT_FOUND", name)
        return {
            **pod.body["tpu"]["nodeSpec"][0]["node"],
            "schedulingConfig": {"spot": True},
            "name": name,
            "id": f"{len(self.pods)}",
            "createTime": iso_timestamp(EPOCH + pod.room),
            "state": state,
            "networkEndpoints": [{"ipAddress": f"10.0.0.{i + 2}", "accessConfig": {}} for i in range(4)],
        }


class Fleet:
    """The agents of a pod's workers, all of one mind."""

    def __init__(self, pod: Pod, workers: int) -> None:
        self._pod, self._workers = pod, workers

    def __len__(self) -> int:
        return self._workers

    def call_all(
        self, command: str, payload: dict[str, Any] | Sequence[dict[str, Any]], workers: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        given = payload if isinstance(payload, dict) else payload[0]
        if command == "start":
            self._pod.started.add(given["attempt"])
        running = given.get("attempt") in self._pod.started
        return [{"active": None, "state": "running" if running else "absent"} for _ in range(self._workers)]

    def close(self) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Setup(Venv):
    """All that is done on the workers before the program starts, in place of the plan's virtual environment."""

    google: Google = field(compare=False)

    def observe(self, context: Context, observed: ObservedResources) -> Any:
        pod = self.google.pod
        return self if pod and pod.set_up else Absent()

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        clock, pod = self.google.clock, self.google.pod
        assert pod is not None, "what it needs is there"
        done = clock.elapsed + SETUP
        clock.until(min(done, pod.lost))
        if pod.lost < done:
            silent = [WorkerError(i, "10.0.0.2", "dropped", "the connection was lost") for i in range(4)]
            raise WorkersFailedError("no worker answers", silent)
        pod.set_up = True

    def destroy(self, context: Context) -> None:
        raise AssertionError("what is on the workers goes with the pod")


@dataclass
class Day:
    """How a day went, seconds. `ended`: when nobody tried any more."""

    useful: float = 0.0
    paid: float = 0.0
    ended: float = 0.0
    pods: int = 0
    usd: float = 0.0


def spend(market: Market, tell: Callable[[Event], None] = lambda _: None) -> Day:
    """The day as one `up` spends it."""
    google, day = Google(market), Day()
    with tempfile.TemporaryDirectory() as folder, chdir(folder), mock.patch.dict(os.environ):
        os.environ["SLIPWAY_HOME"] = f"{folder}/home"
        Path("train.py").write_text("steps = 1\n")
        events = Events(google.clock)
        events.add_listener(tell)
        with suppress(Over):
            drive_run(google, planned(google), day, events)
    day.ended, day.paid, day.pods = google.clock.elapsed, google.paid(), len(google.pods)
    return day


def planned(google: Google) -> Plan:
    """The plan of an ordinary run, of which only the pod and the set-up of its workers are left to be made."""
    config, problems = compose(WORDS)
    assert config is not None, problems
    plan = build_plan(config, "a-project", Path.cwd())
    venv = plan.get(Venv)
    given = {spec.name: getattr(venv, spec.name) for spec in fields(venv)} | {"depends_on": (plan.node.id,)}
    return replace(plan, resources=(replace(plan.node, depends_on=()), Setup(**given, google=google)))


def drive_run(google: Google, plan: Plan, day: Day, events: Events) -> None:
    login: Any = SimpleNamespace(is_authorized=lambda *_: True, key_line=lambda: "slipway:ssh-ed25519 AAAA")
    make: Any = lambda pod: Fleet(cast(Any, google.pod), len(pod.addresses))  # noqa: E731
    where = ("a-project", cast(Any, google), google.clock, events, Path.cwd(), login, 5.0, make)
    context = Context(*where, random_float=random.Random(0).random)
    ledger = Ledger(cast(Any, google), plan.bucket, plan.run_id)

    def follower(**given: Any) -> Any:
        return SimpleNamespace(follow=lambda: followed(google, day, plan, given))

    lease = mock.MagicMock()  # nobody else is there
    lease.current_other.return_value, lease.ensure.return_value = None, 1
    lease.released_on_exit.return_value.__exit__.return_value = False
    with (
        mock.patch.object(drive, "run_lease", return_value=lease),
        mock.patch.object(drive, "pod_lease", return_value=lease),
        mock.patch.object(attempt, "Follower", follower),
    ):
        options = RunOptions((), yes=True)
        driver = drive.RunDriver(options, plan, context, ledger, mock.MagicMock(), mock.MagicMock())
        driver._cost_confirmed = True
        try:
            driver.run()
        finally:
            day.usd = driver.spending.usage().usd or 0.0


def followed(google: Google, day: Day, plan: Plan, given: dict[str, Any]) -> AttemptOutcome:
    """The program runs until the pod is lost, and with it what was computed since a checkpoint."""
    clock, pod, node = google.clock, google.pod, cast(Node, given["node"])
    assert pod is not None, "the program has just been started on it"
    begins = clock.elapsed + START
    try:
        clock.until(pod.lost)
    except Over:
        day.useful += max(0.0, clock.elapsed - begins)
        raise
    kept = max(0.0, pod.lost - begins) // CHECKPOINT * CHECKPOINT
    day.useful += kept
    if kept:
        google.stored[f"runs/{plan.run_id}/checkpoints/{day.useful:.0f}/done"] = b""
    clock.sleep(given["poll_seconds"])  # Google's API is asked so often: at worst it has just been
    workers = tuple(WorkerStatus(silent_seconds=given["poll_seconds"], unreachable=True) for _ in node.status.endpoints)
    seen = Observation(pod=node.pod_seen(given["context"]), workers=workers)
    return AttemptOutcome(diagnose(seen), step=int(day.useful))


def test_nine_tenths_of_the_paid_time_are_steps_that_count_and_droughts_are_waited_out() -> None:
    said: list[Event] = []
    markets = [draw_market(seed) for seed in range(3)]
    days = [spend(market, said.append if market is markets[1] else lambda _: None) for market in markets]
    assert [day.ended for day in days] == [DAY_SECONDS] * 3
    assert statistics.median(day.useful / day.paid for day in days) >= 0.9
    assert all(day.usd for day in days)
    replaced = [e for e in said if e.kind == "note" and e.message.startswith("preempted: the node is preempted; repl")]
    assert len(replaced) == days[1].pods - 1, "every loss of a pod is a preemption"
    assert markets[1].droughts
    assert any("waiting for resources" in e.message for e in said)

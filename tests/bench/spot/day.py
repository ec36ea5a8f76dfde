"""A day on a simulated spot market, as Slipway spends it and as a script does.

Slipway's own `up`, recovery, response, verdict, search, reconciler, ledger and account run on a simulated clock against
a simulated Google; only how the program is followed and how workers are set up are stood in for. Beside it: the retry
loop of a published guide (a bastion with a bash script), on the same market.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from conf.schema.config import Config
from controller.config.compose import compose
from controller.context import Context
from controller.core.errors import SlipwayError
from controller.core.events import Event, Events
from controller.plan.build import Plan, build_plan
from controller.reconcile.resource import Absent, Diff, ObservedResources
from controller.records.ledger import Ledger
from controller.recovery.diagnosis import diagnose
from controller.recovery.verdict import AttemptOutcome, Observation, WorkerStatus
from controller.resources.pod.node import Node
from controller.resources.workers.venv import Venv
from controller.run import attempt, drive
from controller.run.options import RunOptions
from controller.ssh.connect import WorkerError
from controller.ssh.fleet import WorkersFailedError
from tests.bench.spot.market import Fleet, Google, Market, Over, Simulated

WORDS = (
    "cloud=gcp", "cloud.project=a-project", "tpu=v5litepod_16", "program=command", "program.command=[train]",
    "recovery.max_preemptions=1000",
)  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Seconds that things take. `setup`: from READY until the program is told to start; `start`: until its first new
    step (imports, restoring, compiling); `notices`: until a lost pod is seen to be lost."""

    create: float
    delete: float
    setup: float
    start: float
    checkpoint: float
    notices: float = 0.0


SLIPWAY = Costs(create=120, delete=30, setup=75, start=45, checkpoint=120)
"""Wheels of the lock file by uv, all workers at once; compiled programs come from the bucket (`run.compile_cache`)."""
GUIDE = Costs(create=120, delete=30, setup=200, start=90, checkpoint=120, notices=90)
"""apt, a PPA and pip, after a warm-up worker by worker; ssh gives up after three silent intervals of 30 s."""
RETRY_SECONDS, CREATE_FAILS_SECONDS = 60.0, 10.0


@dataclass
class Day:
    """How a day went, seconds. `ended`: when nobody tried any more."""

    useful: float = 0.0
    paid: float = 0.0
    ended: float = 0.0
    pods: int = 0
    usd: float | None = None

    @property
    def goodput(self) -> float:
        return self.useful / self.paid if self.paid else 0.0


@dataclass(frozen=True, kw_only=True)
class Setup(Venv):
    """All that is done on the workers before the program starts, in place of the plan's virtual environment."""

    google: Google = field(compare=False)
    seconds: float = field(compare=False)

    def observe(self, context: Context, observed: ObservedResources) -> Any:
        pod = self.google.pod
        return self if pod and pod.set_up else Absent()

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        clock, pod = self.google.clock, self.google.pod
        assert pod is not None, "what it needs is there"
        done = clock.elapsed + self.seconds
        clock.until(min(done, pod.lost))
        if pod.lost < done:
            silent = [WorkerError(i, "10.0.0.2", "dropped", "the connection was lost") for i in range(4)]
            raise WorkersFailedError("no worker answers", silent)
        pod.set_up = True

    def destroy(self, context: Context) -> None:
        raise AssertionError("what is on the workers goes with the pod")


def on_slipway(market: Market, costs: Costs, tell: Callable[[Event], None] = lambda _: None) -> Day:
    """The day as Slipway spends it."""
    return spend(Google(market, Simulated(market.seconds), costs.create, costs.delete), WORDS, costs, tell)


def spend(
    google: Google,
    words: tuple[str, ...],
    costs: Costs,
    tell: Callable[[Event], None],
    run_seconds: float = float("inf"),
) -> Day:
    """Runs of these words, each of so much work, one after another until the day is over."""
    day, runs = Day(usd=0.0), 0
    config, problems = compose(words)
    assert config is not None, problems
    with tempfile.TemporaryDirectory() as folder, chdir(folder), mock.patch.dict(os.environ):
        os.environ["SLIPWAY_HOME"] = f"{folder}/home"
        Path("train.py").write_text("steps = 1\n")
        events = Events(google.clock)
        events.add_listener(tell)
        while True:
            runs += 1
            seed = config.run.model_copy(update={"seed": runs})
            plan = planned(google, config.model_copy(update={"run": seed}), costs)
            try:
                _drive(google, plan, costs, day, day.useful + run_seconds, events)
            except (Over, SlipwayError) as end:
                tell(Event(google.clock.now(), "note", plan.run_id, f"{type(end).__name__}: {end}"))
                break
    day.ended, day.paid, day.pods = google.clock.elapsed, google.paid(), len(google.pods)
    return day


def _drive(google: Google, plan: Plan, costs: Costs, day: Day, goal: float, events: Events) -> None:
    """One `up`, until the useful time of the day has come to the goal."""
    login: Any = SimpleNamespace(is_authorized=lambda *_: True, key_line=lambda: "slipway:ssh-ed25519 AAAA")
    make: Any = lambda pod: Fleet(cast(Any, google.pod), len(pod.addresses))  # noqa: E731
    random_float, clock = random.Random(0).random, google.clock
    where = ("a-project", cast(Any, google), clock, events, Path.cwd(), login, 5.0, make)
    context = Context(*where, random_float=random_float)
    ledger = Ledger(cast(Any, google), plan.bucket, plan.run_id)

    def follower(**given: Any) -> Any:
        return SimpleNamespace(follow=lambda: followed(google, costs, day, plan, goal, given))

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
            day.usd = (day.usd or 0.0) + (driver.spending.usage().usd or 0.0)


def planned(google: Google, config: Config, costs: Costs) -> Plan:
    """The plan of an ordinary run, of which only the pod and the set-up of its workers are left to be made."""
    plan = build_plan(config, "a-project", Path.cwd())
    venv = plan.get(Venv)
    given = {spec.name: getattr(venv, spec.name) for spec in fields(venv)} | {"depends_on": (plan.node.id,)}
    setup = Setup(**given, google=google, seconds=costs.setup)
    return replace(plan, resources=(replace(plan.node, depends_on=()), setup))


def followed(google: Google, costs: Costs, day: Day, plan: Plan, goal: float, given: dict[str, Any]) -> AttemptOutcome:
    """The program runs to its goal, or until the pod is lost, and with it what was computed since a checkpoint."""
    clock, pod, node = google.clock, google.pod, cast(Node, given["node"])
    assert pod is not None, "the program has just been started on it"
    begins = clock.elapsed + costs.start
    done = begins + goal - day.useful
    try:
        clock.until(min(pod.lost, done))
        if done <= pod.lost:
            day.useful = goal
            ended = tuple(WorkerStatus(ended=True, code=0) for _ in node.status.endpoints)
            return AttemptOutcome(diagnose(Observation(pod=node.pod_seen(given["context"]), workers=ended)))
    except Over:
        day.useful += max(0.0, clock.elapsed - begins)
        raise
    kept = max(0.0, pod.lost - begins) // costs.checkpoint * costs.checkpoint
    day.useful += kept
    if kept:
        google.objects[f"runs/{plan.run_id}/checkpoints/{day.useful:.0f}/done"] = b""
    clock.sleep(given["poll_seconds"])  # Google's API is asked so often: at worst it has just been
    workers = tuple(WorkerStatus(silent_seconds=given["poll_seconds"], unreachable=True) for _ in node.status.endpoints)
    return AttemptOutcome(
        diagnose(Observation(pod=node.pod_seen(given["context"]), workers=workers)), step=int(day.useful)
    )


def in_a_loop(market: Market, costs: Costs, attempts: float) -> Day:
    """The day as the guide's script spends it: create, set up, run over ssh, delete, and again after a minute."""
    day, time, made = Day(), 0.0, 0
    while time < market.seconds and made < attempts:
        made += 1
        if market.room_from(time) > time:  # a stock-out is an attempt like any other
            time += CREATE_FAILS_SECONDS + RETRY_SECONDS
            continue
        ready = time + costs.create
        lost = min(market.next_loss(ready), market.seconds)
        ran = max(0.0, lost - ready - costs.setup - costs.start)
        day.useful += ran if lost == market.seconds else ran // costs.checkpoint * costs.checkpoint
        day.paid += max(0.0, lost - ready)
        day.pods += 1
        time = lost + costs.notices + costs.delete + RETRY_SECONDS
    day.ended = min(time, market.seconds)
    return day

"""A day on a simulated spot market, as Slipway spends it.

Slipway's own `up`, recovery, response, verdict, search, reconciler, ledger and account run on a simulated clock against
a simulated Google; only how the program is followed and how workers are set up are stood in for.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from contextlib import chdir, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from conf.schema.config import Config
from controller.config.compose import compose
from controller.context import Context
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
    step (imports, restoring, compiling)."""

    create: float
    delete: float
    setup: float
    start: float
    checkpoint: float


SLIPWAY = Costs(create=120, delete=30, setup=75, start=45, checkpoint=120)
"""Wheels of the lock file by uv, all workers at once; compiled programs come from the bucket (`run.compile_cache`)."""


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
    """The day as Slipway spends it: one run."""
    google = Google(market, Simulated(market.seconds), costs.create, costs.delete)
    day = Day(usd=0.0)
    config, problems = compose(WORDS)
    assert config is not None, problems
    with tempfile.TemporaryDirectory() as folder, chdir(folder), mock.patch.dict(os.environ):
        os.environ["SLIPWAY_HOME"] = f"{folder}/home"
        Path("train.py").write_text("steps = 1\n")
        events = Events(google.clock)
        events.add_listener(tell)
        with suppress(Over):
            _drive(google, planned(google, config, costs), costs, day, events)
    day.ended, day.paid, day.pods = google.clock.elapsed, google.paid(), len(google.pods)
    return day


def _drive(google: Google, plan: Plan, costs: Costs, day: Day, events: Events) -> None:
    """One `up`, until the day is over."""
    login: Any = SimpleNamespace(is_authorized=lambda *_: True, key_line=lambda: "slipway:ssh-ed25519 AAAA")
    make: Any = lambda pod: Fleet(cast(Any, google.pod), len(pod.addresses))  # noqa: E731
    random_float, clock = random.Random(0).random, google.clock
    where = ("a-project", cast(Any, google), clock, events, Path.cwd(), login, 5.0, make)
    context = Context(*where, random_float=random_float)
    ledger = Ledger(cast(Any, google), plan.bucket, plan.run_id)

    def follower(**given: Any) -> Any:
        return SimpleNamespace(follow=lambda: followed(google, costs, day, plan, given))

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


def followed(google: Google, costs: Costs, day: Day, plan: Plan, given: dict[str, Any]) -> AttemptOutcome:
    """The program runs until the pod is lost, and with it what was computed since a checkpoint."""
    clock, pod, node = google.clock, google.pod, cast(Node, given["node"])
    assert pod is not None, "the program has just been started on it"
    begins = clock.elapsed + costs.start
    try:
        clock.until(pod.lost)
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

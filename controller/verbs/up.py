"""`slipway up`: make the plan true, launch, follow, and start again from the last checkpoint when the pod is lost.

Recovery is reconcile in a loop: a preempted node is one more difference. A finished run is reported and nothing is
touched, though its pod is gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from conf.cloud import LocalCloud
from controller.connect import NO_PROJECT
from controller.cost import most, rate
from controller.errors import ConfigError, OverBudget, SlipwayError, WrongDevices
from controller.follow import Follower, Outcome
from controller.google import GoogleError, ServiceDisabled
from controller.launch import alive, launch, stop
from controller.ledger import Ledger, Result
from controller.plan import Plan
from controller.preflight import probe
from controller.recall import remember
from controller.reconcile import destroy, reconcile
from controller.records.record import RECORD, Recorder
from controller.recover import Recovery
from controller.resource import Absent
from controller.resources.node import Node
from controller.resources.watchdog import Watchdog
from controller.session import opened
from controller.spending import Spending
from controller.ssh import Fleet, WorkerError, WorkersFailed
from controller.turns import Turns
from controller.verdict import Kind
from controller.view import Screen, View
from controller.words import counted
from controller.world import World

if TYPE_CHECKING:
    from controller.cli import Command
    from controller.emulator import Emulator


def run(command: Command) -> int:
    bring_about(command)
    return 0


def bring_about(command: Command) -> str:
    """Carry out what the command names; returns the run's id."""
    with opened(command, repeat=True) as (plan, world, emulator):
        if plan.project == NO_PROJECT:
            raise ConfigError(
                "cloud.project: is not set; set it, or run `gcloud config set project ID`, or use cloud=local"
            )
        remember(command.overrides, Path.cwd(), plan.run_id if command.run else "")
        carry_out(command, plan, world, emulator)
    return plan.run_id


def carry_out(command: Command, plan: Plan, world: World, emulator: Emulator | None) -> Result | None:
    """Bring the run to its end, whatever happens; the result, or None where it goes on or was cancelled."""
    with View(plan, json_lines=command.flags.json) as view:
        world.events.listen(view)
        return carry_on(command, plan, world, emulator, view)


def carry_on(
    command: Command, plan: Plan, world: World, emulator: Emulator | None, view: Screen, sweep: str = ""
) -> Result | None:
    """The same where somebody else shows it.

    Args:
        sweep: the sweep that the run belongs to.
    """
    ledger = Ledger(world.google, plan.bucket, plan.run_id)
    recorder = Recorder(plan, world, ledger, command.overrides, sweep)
    if (result := ledger.result()) is not None:
        up = Up(command, plan, world, ledger, view, recorder)
        left = up.clean_up(result)
        recorder.catch_up(result, up.spending)
        view.finished(result, again=not left)
        return result
    _before_it_bills(command, plan, world, view)
    with recorder.listening():
        if emulator is not None:
            _script_faults(emulator, plan)
        up = Up(command, plan, world, ledger, view, recorder)
        try:
            result = up.run()
        except SlipwayError as error:
            recorder.stopped("failed", str(error), up.spending)
            raise
        if result is not None:
            recorder.end(result, up.spending)
            view.finished(result, cost=str(up.spending.spent()))
    return result


class Up:
    """One `up` of one run."""

    def __init__(
        self, command: Command, plan: Plan, world: World, ledger: Ledger, view: Screen, recorder: Recorder
    ) -> None:
        self.command, self.plan, self.world, self.ledger, self.view = command, plan, world, ledger, view
        self.recorder = recorder
        self.spending = Spending(world.google, world.clock, plan.bucket, plan.run_id, plan.config)
        self.turns = Turns(world.google, world.clock, plan.bucket, plan.node.name)
        self.recovery = Recovery(plan, world, ledger, self.spending, self._poll_seconds, self._delete_pod)

    def run(self) -> Result | None:
        """Returns the result, or None when detached from a run that goes on."""
        while True:
            if over := self.spending.over():
                self._end_over_budget(over)
            outcome, attempt, error = self._attempt()
            if outcome is None:
                return None
            match outcome.verdict.kind:
                case Kind.FINISHED:
                    return self._finish(outcome, attempt)
                case Kind.CANCELLED:
                    self.recorder.stopped("cancelled", "", self.spending)
                    self._note("cancelled; the same command starts it again from its last checkpoint")
                    return None
                case Kind.OVER_BUDGET:
                    self._end_over_budget(outcome.verdict.words)
                case _:
                    self.recovery.respond(outcome, attempt, error)

    def _attempt(self) -> tuple[Outcome | None, int, SlipwayError | None]:
        """Reconcile, launch and follow once: how it ended (None: detached), and why it did not come to an attempt."""
        plan, world = self.plan, self.world
        try:
            node: Node = self._made()
            fleet = world.fleet(node)
            with self._turn(fleet):
                self.spending.begin(node)
                self.view.usd_per_hour = self.spending.rate(node).total
                self._tell_watchdog(node)
                started, was_running = launch(plan, self.ledger, node, fleet, world.clock)
            if not (was_running and self.ledger.has(RECORD)):  # a controller may have been killed before that
                self.recorder.begin(fleet)
        except (WorkersFailed, WorkerError, WrongDevices, GoogleError) as error:
            verdict = self.recovery.setup_verdict(error)
            if isinstance(error, GoogleError) and not error.passes and verdict.kind is Kind.SETUP_FAILURE:
                raise
            return Outcome(verdict), 0, error
        verb = "re-attached to" if was_running else "launched"
        self._note(f"{verb} attempt {started.attempt} on {counted(plan.node.workers, 'worker')}")
        if self.command.flags.detach:
            return None, started.attempt, None
        outcome = Follower(
            world=world,
            node=node,
            fleet=fleet,
            run_id=plan.run_id,
            attempt=started.attempt,
            recovery=plan.config.recovery,
            poll_seconds=self._poll_seconds,
            begun=was_running,
            over=self.spending.over,
            cancelled=partial(self.ledger.cancelled, started.attempt),
        ).follow()
        if outcome is None:
            self.view.detached()
        return outcome, started.attempt, None

    def _made(self) -> Node:
        """The pod, and all that the program needs there. A pod that was made and cannot be used has cost as well."""
        try:
            return reconcile(self.plan.resources, self.world)[self.plan.node.id]
        except SlipwayError:
            with suppress(SlipwayError):
                seen = self.plan.node.observe(self.world, {})
                if isinstance(seen, Node) and seen.uid:
                    self.spending.begin(seen, if_new=True)
            raise

    def _tell_watchdog(self, node: Node) -> None:
        """How long this run may have the pod; only now is it ours alone."""
        for resource in self.plan.resources:
            if isinstance(resource, Watchdog):
                resource.tell(self.world, node, self.spending.hours_left())

    def _end_over_budget(self, why: str) -> NoReturn:
        """End the program and delete the pod, if the run has one; what was saved stays, and so does an adopted pod."""
        seen = self.plan.node.there(self.world)
        if seen is not None and seen.uid in {life.uid for life in self.spending.lives() if life.ended is None}:
            self._note(f"over budget: {why}; ending the run and its pod")
            self.ledger.cancel()
            if seen.state == "READY":
                stop(self.world.fleet(seen), self.plan.run_id)
            self._delete_pod()
        self.spending.end("over budget")
        raise OverBudget(
            f"{self.plan.run_id} was ended: {why}. Spent: {self.spending.spent()}. Raise the limit, and the same "
            f"command goes on from the last checkpoint; results: gs://{self.plan.bucket}/{self.ledger.prefix}"
        )

    @contextmanager
    def _turn(self, fleet: Fleet) -> Iterator[None]:
        """One program at a time: with --queue wait for the others, else stop one that runs here if the user says so."""
        if self.command.flags.queue and alive(fleet) != {self.plan.run_id}:
            with self.turns.joined(self.plan.run_id) as refresh:
                self._wait(fleet, refresh)
                yield
            return
        for other in alive(fleet) - {self.plan.run_id}:
            question = f"{other} is running on this pod. Stop it and start {self.plan.run_id}?"
            if not self.view.ask(question, self.command.flags.yes):
                raise ConfigError(
                    f"the pod is busy with {other}; --queue waits for it, --yes replaces it, `slipway cancel` ends it"
                )
            stop(fleet, other)
            self._note(f"stopped {other}")
        yield

    def _wait(self, fleet: Fleet, refresh: Callable[[], None]) -> None:
        """Until nothing else runs here and nobody who came earlier still waits."""
        told: list[str] = []
        while ahead := [*sorted(alive(fleet) - {self.plan.run_id}), *self._earlier()]:
            if ahead != told:
                self._note(f"waiting for {', '.join(ahead)}")
                told = ahead
            self.world.clock.sleep(self._poll_seconds)
            refresh()

    def _earlier(self) -> list[str]:
        line = self.turns.waiting()
        return line[: line.index(self.plan.run_id)] if self.plan.run_id in line else line

    def _finish(self, outcome: Outcome, attempt: int) -> Result:
        """Record the result, then let the pod go if the policy says so."""
        now = self.world.clock.now()
        started = self.ledger.launches()[0].time
        summary: dict[str, Any] = next((e["summary"] for w, e in sorted(outcome.ends) if e["summary"]), {})
        cleanup = self.plan.config.cleanup.on_success
        result = Result(self.plan.run_id, "finished", attempt, now, round(now - started, 1), summary, cleanup)
        self.ledger.finish(result)
        self.clean_up(result)
        return result

    def clean_up(self, result: Result) -> bool:
        """Let the pod of a finished run go if that was the policy and it is still this run's; says whether it was."""
        if result.cleanup != "delete":
            return False
        seen = self.plan.node.there(self.world)  # it may be under repair just now
        if seen is None or seen.uid not in {life.uid for life in self.spending.lives() if not life.ended}:
            return False
        if next_runs := self.turns.waiting():
            self._note(f"the pod stays: {', '.join(next_runs)} waits for it")
            return False
        self._delete_pod()
        self.spending.end("finished")
        return True

    @property
    def _poll_seconds(self) -> float:
        return self.plan.config.recovery.poll_seconds if self.world.billed else self.world.pace

    def _delete_pod(self) -> None:
        """An adopted one is not ours."""
        if not self.plan.node.adopt:
            destroy([replace(self.plan.node, needs=())], self.world)

    def _note(self, words: str) -> None:
        self.world.events.emit("note", self.plan.run_id, words)


def _before_it_bills(command: Command, plan: Plan, world: World, view: Screen) -> None:
    """Ask Google, then the user, before the first thing that is billed; a pod that is there already is paid for.

    Raises:
        ConfigError: a live check found an error, or the user does not want it.
    """
    try:
        seen = plan.node.observe(world, {})
    except ServiceDisabled:
        seen = Absent()
    if not isinstance(seen, Absent):
        return
    findings = probe(plan.config, world)
    if errors := [finding for finding in findings if finding.severity == "error"]:
        raise ConfigError(errors)
    for finding in findings:
        world.events.emit("note", plan.run_id, f"{finding.severity}: {finding}")
    if not world.billed or plan.node.adopt:
        return
    price = rate(plan.config, world.clock.now())
    cost = "a price that is not known" if price.tpu is None else price
    question = f"Create {plan.node.title} for {cost}? The run costs {most(plan.config, price)}."
    if not view.ask(question, command.flags.yes):
        raise ConfigError("nothing was created; say --yes to go on without being asked")


def _script_faults(emulator: Emulator, plan: Plan) -> None:
    """Tell the emulated cloud of the misfortune that the config scripts; the same script counts once per run."""
    faults = list(plan.config.cloud.faults) if isinstance(plan.config.cloud, LocalCloud) else []
    if faults:
        key = hashlib.sha256(json.dumps([plan.run_id, faults], sort_keys=True).encode()).hexdigest()
        emulator.post("faults", {"key": key, "faults": faults})

"""`slipway up`: make the plan true, launch, follow, and start again from the last checkpoint when the pod is lost.

Recovery is reconcile in a loop: a preempted node is one more difference. A finished run is reported and nothing is
touched, though its pod is gone.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from conf.schema.infra.cloud import LocalCloud
from controller.cli.last_command import remember
from controller.cli.view import Screen, View
from controller.cloud.connect import NO_PROJECT
from controller.context import Context
from controller.core.clock import Interrupted
from controller.core.errors import ConfigError, Fenced, OverBudget, SlipwayError, WrongDevices
from controller.core.text import counted
from controller.gcp.client import GoogleError
from controller.lease.lease import Asked, Held
from controller.lease.scope import lease_of, working_under
from controller.lease.store import Seen
from controller.plan.build import Plan
from controller.reconcile.reconciler import destroy, reconcile
from controller.records.ledger import Ledger, Result
from controller.records.recorder import RECORD, Recorder
from controller.records.spending import Spending
from controller.recovery.diagnosis import Kind
from controller.recovery.recover import Recovery
from controller.resources.pod.node import Node
from controller.resources.workers.watchdog import Watchdog
from controller.run.approval import before_it_bills
from controller.run.follow import Follower, Outcome
from controller.run.handover import Handover
from controller.run.launch import alive, launch, stop
from controller.run.queue import Turns
from controller.run.queue_wait import Line
from controller.run.session import opened
from controller.run.standby import Beside, Ended, Left
from controller.ssh.fleet import Fleet, WorkerError, WorkersFailed

if TYPE_CHECKING:
    from controller.cli.main import Command
    from controller.cloud.emulator import Emulator


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


def carry_out(
    command: Command,
    plan: Plan,
    world: Context,
    emulator: Emulator | None,
    handed_over: dict[str, Any] | None = None,
) -> Result | None:
    """Bring the run to its end, whatever happens; the result, or None where it goes on or was cancelled.

    Args:
        handed_over: on a bastion, what the machine that handed the run over has written down.
    """
    with View(plan, json_lines=command.flags.json) as view:
        world.events.listen(view)
        return carry_on(command, plan, world, emulator, view, handed_over=handed_over)


def carry_on(
    command: Command,
    plan: Plan,
    world: Context,
    emulator: Emulator | None,
    view: Screen,
    sweep: str = "",
    handed_over: dict[str, Any] | None = None,
) -> Result | None:
    """The same where somebody else shows it.

    Args:
        sweep: the sweep that the run belongs to.
        handed_over: see `carry_out`.
    """
    ledger = Ledger(world.google, plan.bucket, plan.run_id)
    recorder = Recorder(plan, world, ledger, command.overrides, sweep, handed_over)
    up = Up(command, plan, world, ledger, view, recorder, emulator, on_bastion=handed_over is not None)
    if (result := ledger.result()) is not None:
        left = up.clean_up_after(result)
        recorder.catch_up(result, up.spending)
        view.finished(result, again=not left)
        return result
    with recorder.listening():
        if emulator is not None:
            _script_faults(emulator, plan)
        try:
            result = up.run()
        except (Fenced, Ended):
            raise  # another controller keeps the record
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
        self,
        command: Command,
        plan: Plan,
        world: Context,
        ledger: Ledger,
        view: Screen,
        recorder: Recorder,
        emulator: Emulator | None = None,
        *,
        on_bastion: bool = False,
    ) -> None:
        self.command, self.plan, self.world, self.ledger, self.view = command, plan, world, ledger, view
        self.recorder = recorder
        self.spending = Spending(world.google, world.clock, plan.bucket, plan.run_id, plan.config)
        self.turns = Turns(world.google, world.clock, plan.bucket, plan.node.name)
        self.recovery = Recovery(plan, world, ledger, self.spending, self._poll_seconds, self._delete_pod)
        self.lease = lease_of(plan, world, "bastion" if on_bastion else "laptop")
        self._emulator = emulator
        self._hands_over = plan.config.recovery.driver == "bastion" and not on_bastion
        self._asked_about_costs = on_bastion
        self._take_over: bool = command.flags.take_over

    def run(self) -> Result | None:
        """Returns the result, or None when detached from a run that goes on.

        Raises:
            Fenced: another controller acts on the pod, by mishap or on demand.
        """
        try:
            with working_under(self.lease, self.plan, self.world):
                try:
                    return self._in_turns()
                except Interrupted:
                    self.lease.check()  # who fences us wakes us up
                    raise
        except Asked as asked:
            if not asked.ends:
                raise
            self._note(str(asked))
            return None

    def _in_turns(self) -> Result | None:
        """Act while nobody else does; else watch, wait or replace the other one, as the user wants it."""
        while True:
            if (other := self.lease.look()) is not None:
                left = self._beside(other)
                if left is not Left.FREE:
                    return left if isinstance(left, Result) else None
            try:
                if not self._asked_about_costs:
                    before_it_bills(self.plan, self.world, self.view, yes=self.command.flags.yes)
                    self._asked_about_costs = True
                if not self._hands_over:
                    return self._act()
                driver = self._hand_over()
            except Held:
                self._note("another controller was faster")
                continue
            left = self._beside(driver)
            if left is not Left.FREE:
                return left if isinstance(left, Result) else None

    def _hand_over(self) -> Seen:
        """Make what the run needs before its pod, then the bastion, and wait until that one acts."""
        handover = Handover(self.plan, self.world, self.ledger, self.lease, self._emulator, self._poll_seconds)
        with self._turn():
            mine = {"yes": self.command.flags.yes, "ssh_key": self.world.ssh_key_line()}
            token = handover.make(lambda: self.recorder.to_hand_over() | mine)
            self._note(f"{handover.bastion.title} is there; waiting until it acts")
            driver = handover.wait(token)
        self._note("the bastion sees the run through: this machine may leave, and the same command looks on again")
        return driver

    def _beside(self, other: Seen) -> Result | Left:
        """What to do while another controller acts on the pod."""
        flags, run_id = self.command.flags, other.term.run_id
        take_over, self._take_over = self._take_over, False
        if run_id == self.plan.run_id and not take_over:
            if flags.detach:
                self._note(f"{other.term} acts on this pod; the run goes on")
                return Left.DETACHED
            beside = Beside(self.plan, self.world, self.ledger, self.lease, self.view, self._poll_seconds)
            return beside.watch(other)
        if flags.queue:
            return Left.FREE  # in line behind it
        question = f"{other.term} acts on this pod. Stop that and start {self.plan.run_id}?"
        if not take_over and not self.view.ask(question, flags.yes):
            raise ConfigError(
                f"the pod is busy with {run_id}; --queue waits for it, --yes replaces it, `slipway cancel` ends it: "
                f"{other.term} acts on it"
            )
        self.lease.take_over("taken over", self._note)
        return Left.FREE

    def _act(self) -> Result | None:
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
                    words = "cancelled; the same command starts it again from its last checkpoint"
                    self._note(words)
                    self.lease.release(words, 0)
                    return None
                case Kind.OVER_BUDGET:
                    self._end_over_budget(outcome.verdict.words)
                case _:
                    self.recovery.respond(outcome, attempt, error)

    def _attempt(self) -> tuple[Outcome | None, int, SlipwayError | None]:
        """Reconcile, launch and follow once: how it ended (None: detached), and why it did not come to an attempt."""
        plan, world = self.plan, self.world
        try:
            with self._turn():
                node: Node = self._made()
                fleet = world.fleet(node)
                self._make_room(fleet)
                self.spending.begin(node)
                self.view.usd_per_hour = self.spending.rate(node).total
                self._tell_watchdog(node)
                started, was_running = launch(plan, self.ledger, node, fleet, world.clock, self.lease.hold)
            if not (was_running and self.ledger.has(RECORD)):  # a controller may have been killed before that
                self.recorder.begin(fleet)
        except (WorkersFailed, WorkerError, WrongDevices, GoogleError) as error:
            verdict = self.recovery.setup_verdict(error)
            if isinstance(error, GoogleError) and not error.passes and verdict.kind is Kind.SETUP_FAILURE:
                raise
            return Outcome(verdict), 0, error
        verb = "re-attached to" if was_running else "launched"
        words = f"{verb} attempt {started.attempt} on {counted(plan.node.workers, 'worker')}"
        self._note(words, attempt=started.attempt)
        if self.command.flags.detach:
            return None, started.attempt, None
        self.lease.hold()  # whoever follows answers for it
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
            glance=self._glance,
        ).follow()
        if outcome is None:
            self.view.detached()
        return outcome, started.attempt, None

    def _glance(self) -> None:
        """Many times a second while the run is followed: are we to go on? In a sweep no signal reaches this thread."""
        self.lease.check()
        self.world.clock.check()

    def _made(self) -> Node:
        """The pod, and all that the program needs there. A pod that was made and cannot be used has cost as well."""
        try:
            return reconcile(self.plan.resources, self.world)[self.plan.node.id]
        except (Fenced, Held):
            raise
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
        self.lease.hold()
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

    def _turn(self) -> AbstractContextManager[None]:
        """With --queue: begins when our turn has come, and nobody is before us until it ends."""
        if not self.command.flags.queue:
            return nullcontext()
        return Line(self.plan, self.world, self.turns, self.lease, self._poll_seconds, self._note).joined()

    def _make_room(self, fleet: Fleet) -> None:
        """One program at a time: stop one that runs here and is no one's to see to, if the user says so."""
        for other in alive(fleet) - {self.plan.run_id}:
            question = f"{other} is running on this pod. Stop it and start {self.plan.run_id}?"
            if not self.view.ask(question, self.command.flags.yes):
                raise ConfigError(
                    f"the pod is busy with {other}; --queue waits for it, --yes replaces it, `slipway cancel` ends it"
                )
            stop(fleet, other)
            self._note(f"stopped {other}")

    def _finish(self, outcome: Outcome, attempt: int) -> Result:
        """Record the result, then let the pod go if the policy says so."""
        self.lease.hold()
        now = self.world.clock.now()
        started = self.ledger.launches()[0].time
        summary: dict[str, Any] = next((e["summary"] for w, e in sorted(outcome.ends) if e["summary"]), {})
        cleanup = self.plan.config.cleanup.on_success
        result = Result(self.plan.run_id, "finished", attempt, now, round(now - started, 1), summary, cleanup)
        self.ledger.finish(result)
        self.clean_up(result)
        self.lease.release("finished", 0)
        return result

    def clean_up_after(self, result: Result) -> bool:
        """Of a controller that was killed before it had cleaned up; one that still lives does it itself."""
        with working_under(self.lease, self.plan, self.world):
            return self.lease.look() is None and self.clean_up(result)

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

    def _note(self, words: str, **data: Any) -> None:
        self.world.events.emit("note", self.plan.run_id, words, **data)


def _script_faults(emulator: Emulator, plan: Plan) -> None:
    """Tell the emulated cloud of the misfortune that the config scripts; the same script counts once per run."""
    faults = list(plan.config.cloud.faults) if isinstance(plan.config.cloud, LocalCloud) else []
    if faults:
        key = hashlib.sha256(json.dumps([plan.run_id, faults], sort_keys=True).encode()).hexdigest()
        emulator.post("faults", {"key": key, "faults": faults})

"""Drive a run to its end: acquire the pod, make attempts, and decide after each how to continue.

Recovery is reconciliation in a loop: a preempted node is one more difference between plan and cloud. A finished run is
only reported, even if its pod no longer exists.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from controller.connect import require_project
from controller.context import Context
from controller.core.errors import CloudError, ConfigError, LeaseLostError, SlipwayError
from controller.core.events import BoardScreen, Event
from controller.core.json_documents import DamagedRecordError
from controller.core.text import object_url
from controller.core.this_process import InterruptedSleepError
from controller.emulator import Emulator
from controller.gcp.google_errors import GoogleError, NotFoundError
from controller.gcp.outages import outlast, retry_for_minutes, wait_out
from controller.lease import LeaseHeldError, ReleaseRequestedError, lease_guard, pod_lease, run_lease
from controller.lease_store import LeaseSnapshot
from controller.plan.build import Plan
from controller.records.ledger import Ledger, Result
from controller.records.recorder import Recorder
from controller.records.spending import Spending
from controller.records.unfinished import ResultNotRecordedError, record_kept_result, retry_deletions
from controller.recovery.recover import RecoveryExecutor
from controller.recovery.responses import VerdictKind
from controller.run.attempt import AttemptRunner
from controller.run.driven_here import driven_here, run_lock
from controller.run.ending import Ending
from controller.run.launch import QueueWaiter
from controller.run.notifications import Notifications
from controller.run.options import RunOptions
from controller.run.preview import confirm_cost
from controller.run.session import open_plan
from controller.run.standby import (
    FinishedMeanwhileError,
    Handover,
    LeaderGaveUpError,
    RemoteStandby,
    Standby,
    StandbyOutcome,
)

T = TypeVar("T")
CANCELLED = "cancelled; run the same command to resume from the last checkpoint"


@contextmanager
def open_run(options: RunOptions) -> Iterator[tuple[Plan, Context, Emulator | None]]:
    """Open the plan to drive and a connection to its cloud. Raises ConfigError without a usable config or project."""
    with open_plan(options, drives=True) as (plan, context, emulator):
        require_project(plan.project)
        yield plan, context, emulator


def drive(
    options: RunOptions,
    plan: Plan,
    context: Context,
    emulator: Emulator | None,
    screen: BoardScreen,
    *,
    sweep: str = "",
    handed_over: dict[str, Any] | None = None,
    spending: Spending | None = None,
    before_budget: Callable[[], object] | None = None,
) -> Result | None:
    """Drive the run to its end, show its progress and keep its record.

    `sweep` is the id of the sweep that the run belongs to; `handed_over` is the laptop's document on a bastion;
    `spending` is its account, if it shares one; `before_budget` ends the time of all pods that vanished, if there are
    others than the run's. Returns None if the run continues without us or was cancelled.
    """
    context.events.add_listener(screen)
    ledger = Ledger(context.google, plan.bucket, plan.run_id)
    recorder = Recorder(plan, context, ledger, options.overrides, sweep, handed_over)
    on_bastion = handed_over is not None
    driver = RunDriver(
        options, plan, context, ledger, screen, recorder, emulator, spending, before_budget, on_bastion=on_bastion
    )

    def tell(message: str) -> None:
        context.events.note(plan.run_id, message)

    record_kept_result(context, ledger)
    if (result := wait_out(context.clock, ledger.result, object_url(plan.bucket), tell)) is not None:
        with driver.ending.handing_over():
            deleted = driver.clean_up_after_crash(result)
            recorder.finish_after_crash(result, driver.spending)
            screen.show_result(result, again=not deleted)
        return result
    lock = run_lock(context, plan.run_id)
    with driver.ending.handing_over(), recorder.recording(), driven_here(lock), driver.fenced():
        if emulator is not None:
            emulator.inject_faults(plan.run_id, plan.config.cloud)
        for line in retry_deletions(context):
            context.events.note(plan.node.id, line)
        try:
            result = driver.run()
        except (LeaseLostError, LeaderGaveUpError, ResultNotRecordedError):
            raise  # another controller keeps the record, or this machine the result
        except SlipwayError as error:
            driver.record_failure(error)
            raise
        except KeyboardInterrupt:
            driver.note_pod_left()
            raise
        if result is not None:
            finish = partial(recorder.finish, result, driver.spending)
            driver.try_for_minutes(finish, "the records of the run are not complete; the same command completes them")
            driver.note_damaged_records()
            screen.show_result(result, cost=str(driver.spending.account.usage()))
    return result


class RunDriver:
    """Drives one run: acquires its pod, makes attempts, and decides after each how to continue."""

    def __init__(
        self, options: RunOptions, plan: Plan, context: Context, ledger: Ledger, screen: BoardScreen,
        recorder: Recorder, emulator: Emulator | None = None, spending: Spending | None = None,
        before_budget: Callable[[], object] | None = None, *, on_bastion: bool = False,
    ) -> None:  # fmt: skip
        self.options, self.plan, self.context, self.ledger, self.screen = options, plan, context, ledger, screen
        self.recorder = recorder
        self.spending = spending or Spending(context.google, context.clock, plan.bucket, plan.run_id, plan.config)
        self._before_budget = before_budget or partial(self.spending.close_vanished, context, plan.node)
        driver_kind = "bastion" if on_bastion else "laptop"
        self.run_lease = run_lease(plan, context, driver_kind)
        self.lease = pod_lease(plan, context, driver_kind, self.run_lease)
        # on this machine, each look takes processor time from the program
        self._poll_seconds = plan.config.recovery.poll_seconds if context.is_billed else 2 * context.poll_seconds
        self.waiter = QueueWaiter(plan, context, self.lease, self._poll_seconds, self._emit_note)
        self.ending = Ending(plan, context, ledger, self.spending, self.waiter, self.lease, self._ensure_unfinished)
        self.recovery = RecoveryExecutor(plan, context, ledger, self.spending, self._poll_seconds, self.ending.give_up)
        self._notifications = Notifications(plan, context)
        self.attempts = AttemptRunner(
            options=options, plan=plan, context=context, ledger=ledger, screen=screen, recorder=recorder,
            spending=self.spending, waiter=self.waiter, lease=self.lease, recovery=self.recovery,
            poll_seconds=self._poll_seconds, notifications=self._notifications,
        )  # fmt: skip
        self._emulator = emulator
        self._delegates_to_bastion = plan.config.recovery.driver == "bastion" and not on_bastion
        self._cost_confirmed = on_bastion
        self._take_over = options.take_over
        self._problems_noted: set[str] = set()
        self._has_no_result = False
        self._asked_for_pod = False
        context.events.add_listener(self._see)

    def run(self) -> Result | None:
        """Drive the run under the lease of its pod; None if it continues without us or was cancelled.

        Raises:
            LeaseLostError: another controller acts on the pod, by accident or by request.
        """
        try:
            with lease_guard(self.lease, self.plan, self.context), self.fenced():
                self.lease.listen()
                self.context.before_pod_write = self.context.google.before_pod_write = self._ensure_unfinished
                self.context.on_surplus = self.spending.add_surplus
                try:
                    return self.acquire()
                except FinishedMeanwhileError as finished:
                    self._emit_note(str(finished))
                    self.lease.release("finished", 0)
                    return finished.result
        except ReleaseRequestedError as asked:
            if not asked.ends_run:
                raise
            self._emit_note(str(asked))
            return None
        finally:
            self.waiter.leave()

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """Raise LeaseLostError for each end of a controller that has lost its lease, which it may not know yet.

        The controller that took the lease over keeps the record of the run: a failure of this one is none of the run.
        """
        try:
            yield
        except InterruptedSleepError:
            self.lease.raise_if_lost()  # the controller that fences us wakes us up
            raise
        except SlipwayError:
            if self.lease.held:
                with suppress(GoogleError):  # a bucket that does not answer tells nothing, and takes no record either
                    self.lease.ensure()
            raise

    def _ensure_unfinished(self) -> int:
        """Acquire or confirm the lease, as `Lease.ensure`; once it is held, nobody else can finish the run.

        Raises:
            FinishedMeanwhileError: somebody did before, after this controller had looked.
        """
        token = self.lease.ensure()
        if not self._has_no_result:
            with suppress(DamagedRecordError):  # it is replaced when the run finishes
                if (result := self.ledger.result()) is not None:
                    raise FinishedMeanwhileError(result)
            self._has_no_result = True
        return token

    def acquire(self) -> Result | None:
        """Drive the run unless another controller does; then watch, queue or replace it as the options say."""
        waits_for = ""
        while True:
            elsewhere = self.run_lease.current_other()
            if elsewhere is not None and elsewhere.record.pod != self.plan.node.name:
                outcome = self._watch_elsewhere(elsewhere)
                if outcome is not StandbyOutcome.LEASE_FREE:
                    return outcome if isinstance(outcome, Result) else None
            if (other := self.lease.current_other()) is not None:
                outcome = self._stand_by(other)
                if outcome is not StandbyOutcome.LEASE_FREE:
                    return outcome if isinstance(outcome, Result) else None
            try:
                if not self._cost_confirmed:
                    confirm_cost(self.plan, self.context, self.screen, yes=self.options.yes)
                    self._cost_confirmed = True
                if not self._delegates_to_bastion:
                    return self._attempt_and_notify()
                bastion = self._delegate_to_bastion()
            except LeaseHeldError as held:  # one that ended between the leases of its run and its pod holds the first
                if (record := held.snapshot.record).id != waits_for:
                    waits_for = record.id
                    until = f"it acts, releases the lease or has not renewed it for {record.seconds:g} s"
                    self._emit_note(f"another controller took the lease first: {held}; waiting until {until}")
                self.context.clock.sleep(self._poll_seconds)
                continue
            outcome = self._stand_by(bastion)
            if outcome is not StandbyOutcome.LEASE_FREE:
                return outcome if isinstance(outcome, Result) else None

    def _delegate_to_bastion(self) -> LeaseSnapshot:
        """Create the run's prerequisites and the bastion, then wait until the bastion acts."""
        handover = Handover(self.plan, self.context, self.ledger, self.lease, self._emulator, self._poll_seconds)
        if self.options.queue:
            self.waiter.await_turn(acquires=False)
        ours = {"yes": self.options.yes, "ssh_key": self.context.ssh_login.key_line()}
        token = handover.start_bastion(lambda: self.recorder.handover_data() | ours)
        self._emit_note(f"waiting for {handover.bastion.title} to take over")
        holder = handover.wait_for_lease(token)
        self.waiter.leave()
        if holder.record.driver == "bastion":
            self._emit_note("the bastion controls the run now: you can disconnect, and the same command re-attaches")
        return holder

    def _watch_elsewhere(self, other: LeaseSnapshot) -> Result | StandbyOutcome:
        """Watch the controller that drives this run on another pod, or replace it."""
        where = f"{other.record} drives it on the pod {other.record.pod}"
        take_over, self._take_over = self._take_over, False
        if take_over:
            self.run_lease.take_over("taken over", self._emit_note)
            self._emit_note(
                f"the workers of {other.record.pod} stop the run's program as soon as the next attempt is on record; "
                "`slipway status --all` shows whether that pod is still billed"
            )
            return StandbyOutcome.LEASE_FREE
        if self.options.detach:
            self._emit_note(f"{where}; the run continues")
            return StandbyOutcome.DETACHED
        watched = (self.plan, self.context, self.ledger, self.run_lease, self.screen, self._poll_seconds)
        return RemoteStandby(*watched).watch(other)

    def _stand_by(self, other: LeaseSnapshot) -> Result | StandbyOutcome:
        """Watch the other controller, queue behind it or replace it."""
        run_id = other.record.run_id
        take_over, self._take_over = self._take_over, False
        if run_id == self.plan.run_id and not take_over:
            if self.options.detach:
                self._emit_note(f"{other.record} controls this pod; the run continues")
                return StandbyOutcome.DETACHED
            standby = Standby(self.plan, self.context, self.ledger, self.lease, self.screen, self._poll_seconds)
            return standby.watch(other)
        if self.options.queue:
            return StandbyOutcome.LEASE_FREE  # queue behind it
        question = f"{other.record} controls this pod. Stop it and start {self.plan.run_id}?"
        if not take_over and not self.screen.ask(question, self.options.yes):
            raise ConfigError(
                f"the pod is busy with {run_id}; --queue waits for it, --yes replaces it, `slipway cancel` ends it: "
                f"{other.record} controls it"
            )
        now = self.lease.current_other()  # it may have changed while the question stood
        if now is None or now.record.run_id != run_id:
            self._emit_note(f"{run_id} no longer controls this pod")
            return StandbyOutcome.LEASE_FREE
        self.lease.take_over("taken over", self._emit_note)
        return StandbyOutcome.LEASE_FREE

    def _attempt_and_notify(self) -> Result | None:
        """Make attempts until the run ends. Only the controller that acts tells of a failure."""
        try:
            return self._attempt_until_done()
        except (LeaseLostError, LeaseHeldError, ReleaseRequestedError):
            raise  # the run goes on, or its owner stopped it
        except SlipwayError as error:
            self._notifications.run_failed(str(error))
            raise

    def _attempt_until_done(self) -> Result | None:
        self.outlast(self.spending.reload)  # another controller may have driven the run while this one stood by
        self.outlast(self._before_budget)
        while True:
            self.note_damaged_records()
            if over := self.outlast(self.spending.budget_exceeded):
                self.ending.end_over_budget(over)
            attempt = self.attempts.run()
            self.note_damaged_records()
            if attempt.outcome is None:
                return None
            match attempt.outcome.verdict.kind:
                case VerdictKind.FINISHED:
                    result = self.ending.finish(attempt)
                    self._notifications.run_ended(result)
                    self.lease.release("finished", 0)
                    return result
                case VerdictKind.CANCELLED:
                    stopped = partial(self.recorder.record_stop, "cancelled", "", self.spending)
                    self.try_for_minutes(stopped, "the end of the run is not on record")
                    self._emit_note(CANCELLED)
                    self.lease.release(CANCELLED, 0)
                    return None
                case VerdictKind.OVER_BUDGET:
                    self.ending.end_over_budget(attempt.outcome.verdict.summary)
                case kind:
                    if kind is VerdictKind.PREEMPTED:
                        self._notifications.pod_preempted(attempt.outcome.verdict.summary)
                    self.recovery.respond(attempt.outcome, attempt.number, attempt.error)

    def note_pod_left(self) -> None:
        """Note that a pod was asked for or is there; without a request, since the user waits for the end."""
        if self._asked_for_pod and not self.plan.node.adopt:
            billed = "is billed or asked for" if self.context.is_billed else "is kept or asked for"
            self._emit_note(
                f"{self.plan.node.title} {billed}; `slipway down` deletes it, the same command goes on with it"
            )

    def _see(self, event: Event) -> None:
        if event.subject == self.plan.node.id and event.kind in ("step_started", "step_done"):
            self._asked_for_pod = "delete" not in (event.message, event.data.get("action"))

    def record_failure(self, failure: SlipwayError) -> None:
        """Record that the run has failed, and note what the pod costs that it leaves behind."""
        try:
            self.recorder.record_stop("failed", str(failure), self.spending)
        except GoogleError as error:
            if not error.is_transient and not isinstance(error, NotFoundError):  # a deleted bucket
                raise
            self._emit_note(f"warning: the failure is not on record: {error}")
        try:
            node = self.ending.own_pod()
        except CloudError as error:
            self._emit_note(f"cannot see whether the pod is left ({error}); `slipway orphans` lists what is billed")
            return
        if node is not None and not node.adopt and not self.ending.is_handed_over:
            price = f" (price: {self.spending.rate(node)})" if self.context.is_billed else ""
            self._emit_note(f"{node.title} is kept{price}; `slipway down` deletes it")

    def clean_up_after_crash(self, result: Result) -> bool:
        """Clean up after a controller that was killed before it could; a living one does it itself."""
        with lease_guard(self.lease, self.plan, self.context):
            return self.ending.clean_up(result)

    def outlast(self, act: Callable[[], T]) -> T:
        """Call a function, again and again while the bucket does not answer. Raises CloudError past the bound."""
        hours = self.plan.config.checkpoint.max_outage_hours
        return outlast(self.context.clock, act, object_url(self.plan.bucket), self._emit_note, hours)

    def try_for_minutes(self, record: Callable[[], object], otherwise: str) -> None:
        """Record something about a run that has ended; nothing waits long for a bucket that does not take it."""
        self.context.google.hurry()
        try:
            record()
        except GoogleError as error:
            self.context.events.note(self.plan.run_id, f"{object_url(self.plan.bucket)}: {error.message}", ended=True)
            try:
                retry_for_minutes(self.context.clock, record)
            except GoogleError as late:
                self._emit_note(f"warning: {otherwise}: {late}")

    def note_damaged_records(self) -> None:
        objects = [object_url(self.plan.bucket, text) for text in self.spending.problems + self.waiter.queue.problems]
        found = [f"{problem}; the run goes on without it" for problem in [*self.ledger.problem_urls, *objects]]
        for problem in [*self.lease.problems, *found]:
            if problem not in self._problems_noted:
                self._problems_noted.add(problem)
                self._emit_note(f"warning: {problem}")

    def _emit_note(self, message: str) -> None:
        self.context.events.note(self.plan.run_id, message)

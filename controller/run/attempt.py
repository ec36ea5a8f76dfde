"""One attempt of a run: provision the pod, launch the program, follow it until it ends."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from controller.context import Context
from controller.core.errors import ConfigError, LeaseLostError, SlipwayError, WrongDevicesError
from controller.core.events import BoardScreen
from controller.core.text import object_url, plural
from controller.gcp.google_errors import GoogleError
from controller.gcp.outages import outlast
from controller.lease import Lease, LeaseHeldError
from controller.plan.build import Plan
from controller.reconcile import reconcile
from controller.records.ledger import Launch, Ledger
from controller.records.recorder import RECORD_FILE, Recorder
from controller.records.spending import Spending, write_limit
from controller.recovery.diagnosis import exit_codes
from controller.recovery.recover import RecoveryExecutor
from controller.recovery.responses import AttemptOutcome, VerdictKind
from controller.resources.machines import Watchdog
from controller.resources.pod.node import Node
from controller.run.follow import Follower
from controller.run.launch import QueueWaiter, launch, running_runs, stop
from controller.run.notifications import AlertWatch, Notifications
from controller.run.options import RunOptions
from controller.run.watchdog_watch import WatchdogWatch
from controller.ssh.fleet import Fleet, WorkerError, WorkersFailedError

T = TypeVar("T")
LEAST_SECONDS = 60.0
"""Shortest interval between two orders to a watchdog, and the least by which an order moves the deadline."""
GRACE_SECONDS = 45.0
"""Delay that lets a live controller end the run first, in order, before the watchdog deletes the pod.

Where the watchdog has died, the dead man's switch follows a minute later: within two minutes of the limit of the run.
"""


class BudgetDeadline:
    """Tells the watchdog of one pod when the budget is spent, and again while that moves away.

    The deadline assumes that all pods of the run are billed until then. With several pods it comes too early while some
    are not rented, so it is computed again whenever half of the time to it has passed. It never moves nearer.
    """

    def __init__(self, plan: Plan, context: Context, spending: Spending, node: Node) -> None:
        self._watchdogs = [resource for resource in plan.resources if isinstance(resource, Watchdog)]
        self._context, self._spending, self._node = context, spending, node
        self._bucket, self._run_id = plan.bucket, plan.run_id
        self._grace = self._until = 0.0
        self._due: float | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the pod has a watchdog."""
        return bool(self._watchdogs)

    def send(self) -> None:
        """Tell the watchdog. Raises WorkersFailedError if worker 0 does not answer."""
        left = self._seconds_left()
        self._grace = 0.0 if left is None else min(GRACE_SECONDS, left / 10)
        self._order(left)

    def send_again(self) -> bool:
        """Start a watchdog that has died again, with what is left; return False once the budget is spent, as below.

        Raises:
            LeaseLostError: another controller has the pod.
        """
        left = self._seconds_left()
        if left == 0.0:
            return False
        self._context.before_pod_write()
        self._order(left)
        return True

    def send_if_due(self) -> None:
        """Tell the watchdog again, if it is time and the deadline has moved away.

        A watchdog that cannot be reached keeps its deadline for now. Once the budget is spent nothing is sent: the
        controller ends the run, and the watchdog must not be faster.

        Raises:
            LeaseLostError: another controller has the pod.
        """
        if self._due is None or self._context.clock.boot_time() < self._due:
            return
        left = self._seconds_left()
        if left is None or left == 0.0:
            self._due = None
            return
        if self._context.clock.boot_time() + left + self._grace < self._until + LEAST_SECONDS:
            self._schedule(left)
            return
        try:
            self._context.before_pod_write()  # this controller may have slept while another one took the pod over
            self._order(left)
        except (LeaseHeldError, LeaseLostError):
            raise
        except SlipwayError as error:
            self._due = self._context.clock.boot_time() + LEAST_SECONDS
            self._context.events.note(self._node.id, f"the watchdog keeps its deadline for now: {error}")

    def _seconds_left(self) -> float | None:
        hours = self._spending.hours_left()
        return None if hours is None else 3600 * hours

    def _order(self, left: float | None) -> None:
        """Give the watchdog its limits; `left`: seconds until the budget is spent."""
        now = self._context.clock.boot_time()
        rest = None if left is None else left + self._grace
        for watchdog in self._watchdogs:
            watchdog.update_limits(self._context, self._node, rest)
            try:
                write_limit(self._context.google, self._bucket, self._node, self._run_id, rest)
            except GoogleError as error:  # it is for `orphans` only
                self._context.events.note(self._node.id, f"`slipway orphans` does not know the pod's limit: {error}")
        if left is not None and self._spending.account.pods > 1:
            self._until = now + left + self._grace
            self._schedule(left)

    def _schedule(self, left: float) -> None:
        self._due = self._context.clock.boot_time() + max(LEAST_SECONDS, left / 2)


@dataclass(frozen=True)
class AttemptResult:
    number: int
    """Number of the attempt, from 1; 0 if the program was not launched."""
    outcome: AttemptOutcome | None = None
    """Outcome of the program; None if we detached and the program continues."""
    error: SlipwayError | None = None
    """Why the program was not launched; None if it was."""
    launched: float = 0.0
    """When it was launched, in seconds since the epoch."""


@dataclass
class AttemptRunner:
    """Runs the attempts of one run, one after the other."""

    options: RunOptions
    plan: Plan
    context: Context
    ledger: Ledger
    screen: BoardScreen
    recorder: Recorder
    spending: Spending
    waiter: QueueWaiter
    lease: Lease
    recovery: RecoveryExecutor
    poll_seconds: float
    notifications: Notifications
    _may_stop: set[str] | None = None
    """Runs without a controller that the user agreed to stop; None before the first look at the pod."""
    _deadline: BudgetDeadline | None = None
    _watch: WatchdogWatch | None = None

    def run(self) -> AttemptResult:
        """Provision, launch and follow once."""
        try:
            if self.options.queue:
                self.waiter.await_turn()
            node, fleet = self.provision()
            guard = self.context.before_pod_write
            launched, was_running = launch(self.plan, self.ledger, node, fleet, self.context.clock, guard)
            self.waiter.leave()
            if not (was_running and self.ledger.exists(RECORD_FILE)):  # a controller may have been killed before that
                self.recorder.begin(fleet)
        except (WorkersFailedError, WorkerError, WrongDevicesError, GoogleError) as error:
            verdict = self.recovery.diagnose_setup(error)
            if isinstance(error, GoogleError) and not error.is_transient and verdict.kind is VerdictKind.SETUP_FAILURE:
                raise
            return AttemptResult(0, AttemptOutcome(verdict), error)
        if not self.options.detach:
            self._outlast(self.lease.ensure)  # only the lease holder may follow, and a run that waits sees it
        verb = "re-attached to" if was_running else "launched"
        message = f"{verb} attempt {launched.attempt} on {plural(self.plan.node.spec.workers, 'worker')}"
        self._note(message, attempt=launched.attempt, launched=True)
        if self.options.detach:
            return AttemptResult(launched.attempt)
        outcome = self.follow(node, fleet, launched, was_running)
        return AttemptResult(launched.attempt, outcome, launched=launched.time)

    def provision(self) -> tuple[Node, Fleet]:
        """Create the pod and set up its workers, for this run alone."""
        if self._may_stop is None:
            self._may_stop = self._ask_about_leftovers()
        node = self._reconcile()
        fleet = node.fleet(self.context)
        self._stop_leftover_program(fleet)
        if self.spending.is_billed(node):
            self.lease.check()  # to attach to a run writes nothing
        else:
            self.context.before_pod_write()
        self.spending.open_billing(node)
        self.screen.set_price(self.spending.rate(node).total)
        self._deadline = BudgetDeadline(self.plan, self.context, self.spending, node)
        self._deadline.send()  # only now does the pod belong to this run alone
        if self._deadline.is_kept:
            self._watch = WatchdogWatch(self.context, node, fleet, self._deadline.send_again)
        return node, fleet

    def _reconcile(self) -> Node:
        """Reconcile the plan; a pod that was created but is unusable is billed too."""
        try:
            return reconcile(self.plan.resources, self.context)[self.plan.node.id]
        except (LeaseLostError, LeaseHeldError):
            raise
        except SlipwayError:
            with suppress(SlipwayError):
                node = self.plan.observe_pod(self.context)
                if isinstance(node, Node) and node.status.uid:
                    self.spending.open_billing(node, if_new=True)
            raise

    def _ask_about_leftovers(self) -> set[str]:
        """Ask, before anything is changed, about programs without a controller on a pod that exists; return their runs.

        Raises:
            ConfigError: the user declined.
        """
        try:
            node = self.plan.observe_pod(self.context)
            if not isinstance(node, Node) or not node.is_ready or not node.accepts_our_key(self.context):
                return set()
            others = running_runs(node.fleet(self.context)) - {self.plan.run_id}
        except (GoogleError, WorkersFailedError, WorkerError):
            return set()  # the set-up says what is wrong, and its end looks again
        for other in others:
            self._ask_to_stop(other)
        return others

    def _ask_to_stop(self, other: str) -> None:
        question = f"{other} is running on this pod. Stop it and start {self.plan.run_id}?"
        if not self.screen.ask(question, self.options.yes):
            raise ConfigError(
                f"the pod is busy with {other}; --queue waits for it, --yes replaces it, `slipway cancel` ends it"
            )

    def _stop_leftover_program(self, fleet: Fleet) -> None:
        """Stop a leftover program without a controller, if the user agrees: a pod runs one program at a time."""
        for other in running_runs(fleet) - {self.plan.run_id}:
            if other not in (self._may_stop or ()):
                self._ask_to_stop(other)
            if other in running_runs(fleet):  # it may have ended while the question stood
                stop(fleet, other)
                self._note(f"stopped {other}", stopped=other)
            else:
                self._note(f"{other} has ended meanwhile")

    def follow(self, node: Node, fleet: Fleet, launched: Launch, was_running: bool) -> AttemptOutcome | None:
        """Follow the attempt until it ends; None if the user detached."""
        told = self.notifications.alert_raised
        watch = self._outlast(lambda: AlertWatch(self.plan, self.context, self.ledger, launched, told))
        with watch.watching():
            outcome = Follower(
                context=self.context,
                node=node,
                fleet=fleet,
                run_id=self.plan.run_id,
                attempt=launched.attempt,
                recovery=self.plan.config.recovery,
                exit_codes=exit_codes(self.plan.config.program),
                poll_seconds=self.poll_seconds,
                already_running=was_running,
                budget_exceeded=self.spending.budget_exceeded,
                is_cancelled=partial(self.ledger.is_cancelled, launched.attempt),
                on_tick=self._tick,
                on_idle=watch.tick,
            ).follow()
            if outcome is not None:
                watch.end()
        if outcome is None:
            self.screen.show_detached()
        return outcome

    def _tick(self) -> None:
        """Move the deadline; raise if the lease is lost or the user interrupted: a sweep's threads get no signal."""
        self.lease.raise_if_lost()
        self.context.clock.raise_if_interrupted()
        if self._deadline is not None:
            self._deadline.send_if_due()
        if self._watch is not None:
            self._watch.tick()

    def _outlast(self, act: Callable[[], T]) -> T:
        hours = self.plan.config.checkpoint.max_outage_hours
        return outlast(self.context.clock, act, object_url(self.plan.bucket), self._note, hours)

    def _note(self, message: str, **data: int | str) -> None:
        self.context.events.note(self.plan.run_id, message, **data)

"""One attempt of a run: provision the pod, launch the program, follow it until it ends."""

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from controller.context import Context
from controller.core.errors import ConfigError, LeaseLostError, SlipwayError, WrongDevicesError
from controller.core.text import object_url, plural
from controller.core.ui import BoardScreen
from controller.gcp.errors import GoogleError
from controller.gcp.retries import outlast
from controller.lease.lease import Lease, LeaseHeldError
from controller.plan.build import Plan
from controller.reconcile.reconciler import reconcile
from controller.records.budget_deadline import BudgetDeadline
from controller.records.ledger import Launch, Ledger
from controller.records.recorder import RECORD_FILE, Recorder
from controller.records.spending import Spending
from controller.recovery.diagnosis import exit_codes
from controller.recovery.recover import RecoveryExecutor
from controller.recovery.verdict import AttemptOutcome, VerdictKind
from controller.resources.pod.node import Node
from controller.run.alert_watch import AlertWatch
from controller.run.follow import Follower
from controller.run.launch import launch, running_runs, stop
from controller.run.notifications import Notifications
from controller.run.options import RunOptions
from controller.run.queue import PodQueue, QueueWaiter
from controller.ssh.fleet import Fleet, WorkerError, WorkersFailedError


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
    queue: PodQueue
    lease: Lease
    recovery: RecoveryExecutor
    poll_seconds: float
    notifications: Notifications
    _may_stop: set[str] | None = None
    """Runs without a controller that the user agreed to stop; None before the first look at the pod."""
    _deadline: BudgetDeadline | None = None

    def run(self) -> AttemptResult:
        """Provision, launch and follow once."""
        try:
            with self.queue_turn():
                node, fleet = self.provision()
                guard = self.context.before_pod_write
                launched, was_running = launch(self.plan, self.ledger, node, fleet, self.context.clock, guard)
            if not (was_running and self.ledger.exists(RECORD_FILE)):  # a controller may have been killed before that
                self.recorder.begin(fleet)
        except (WorkersFailedError, WorkerError, WrongDevicesError, GoogleError) as error:
            verdict = self.recovery.diagnose_setup(error)
            if isinstance(error, GoogleError) and not error.is_transient and verdict.kind is VerdictKind.SETUP_FAILURE:
                raise
            return AttemptResult(0, AttemptOutcome(verdict), error)
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

        def begin() -> AlertWatch:
            self.lease.ensure()  # only the lease holder may follow
            return AlertWatch(self.plan, self.context, self.ledger, launched, self.notifications.alert_raised)

        hours = self.plan.config.checkpoint.max_outage_hours
        watch = outlast(self.context.clock, begin, object_url(self.plan.bucket), self._note, hours)
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

    def queue_turn(self) -> AbstractContextManager[None]:
        """Wait in the queue if --queue is set, and keep the turn until the context ends."""
        if not self.options.queue:
            return nullcontext()
        return QueueWaiter(self.plan, self.context, self.queue, self.lease, self.poll_seconds, self._note).enqueued()

    def _note(self, message: str, **data: int | str) -> None:
        self.context.events.note(self.plan.run_id, message, **data)

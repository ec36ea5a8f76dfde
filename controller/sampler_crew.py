"""Drive a run together with its pods of samplers: `up` itself drives each of them, in a thread of its own.

The threads start once an attempt of the trainer has been launched, and pods that were given up are tried again at the
next launch. Losing a pod costs the trainer nothing but time. When the trainer's run ends, in whatever way, its pods of
samplers are deleted; when only this controller ends, they go on, and `up` re-attaches to them.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from controller.connect import open_context
from controller.context import Context
from controller.core.errors import LeaseLostError, OverBudgetError, SlipwayError
from controller.core.events import BoardScreen, Event, FinishedRun
from controller.core.this_process import InterruptedSleepError
from controller.emulator import Emulator
from controller.lease import LeaseHeldError, pod_lease
from controller.plan.build import Plan
from controller.plan.samplers import price_of_pods, sampler_plans
from controller.reconcile import Pending
from controller.records.ledger import Ledger, Result
from controller.records.spending import Account, Spending
from controller.resources.pod.node import Node
from controller.run import drive as running
from controller.run.launch import running_runs
from controller.run.options import RunOptions
from controller.run.standby import LeaderGaveUpError
from controller.sampler_release import ReplacedRuns, end_pod

SHUTDOWN_SECONDS = 10.0
"""Time for the threads to release their pods; a worker may be slow to answer."""
FINISH_SECONDS = 60.0
"""Time for samplers to see that the run has finished and end by themselves, before they are ended."""
ELSEWHERE = (LeaseLostError, LeaseHeldError, LeaderGaveUpError)
"""Errors after which another controller drives the run."""


def drive(
    options: RunOptions, plan: Plan, context: Context, emulator: Emulator | None, screen: BoardScreen
) -> Result | None:
    """Drive a run as `controller.run.drive` does, and its pods of samplers, if it has any."""
    plans = sampler_plans(plan, Path.cwd())
    with ReplacedRuns(plan, {one.node.name for one in plans}, context).ended_on_exit():
        if not plans:
            return running.drive(options, plan, context, emulator, screen)
        return _drive_with(Crew(options, plan, plans, context), options, plan, context, emulator, screen)


def _drive_with(
    crew: "Crew", options: RunOptions, plan: Plan, context: Context, emulator: Emulator | None, screen: BoardScreen
) -> Result | None:
    context.events.add_listener(crew)
    with crew.left_on_exit():
        try:
            spending = crew.spending_of(plan)
            result = running.drive(
                options, plan, context, emulator, screen, spending=spending, before_budget=crew.close_vanished
            )
        except ELSEWHERE:
            raise
        except SlipwayError as error:
            if crew.was_started or isinstance(error, OverBudgetError) or not _may_be_training(plan, context):
                crew.end("the trainer's run has failed")
            raise
        if result is not None:
            crew.finish()
        elif options.detach:
            crew.join(None)
        elif crew.was_started and _is_cancelled(plan, context):
            crew.end("the trainer's run was cancelled", only_idle=True)  # `cancel` may be at it
    return result


def _may_be_training(plan: Plan, context: Context) -> bool:
    """Return whether the run's program is on its pod, or nobody can tell: its samplers are needed then."""
    try:
        if pod_lease(plan, context).current_other() is not None:
            return True
        node = plan.observe_pod(context)
        if not isinstance(node, Node) or not node.is_ready:
            return isinstance(node, Pending)
        return plan.run_id in running_runs(node.fleet(context))
    except SlipwayError:
        return True


def _is_cancelled(plan: Plan, context: Context) -> bool:
    ledger = Ledger(context.google, plan.bucket, plan.run_id)
    launches = ledger.launches()
    return bool(launches) and ledger.is_cancelled(launches[-1].attempt)


@dataclass(frozen=True)
class _Screen:
    """Passes on what happens on one pod of samplers; asks nothing, since the trainer's run has asked."""

    crew: "Crew"
    number: int

    def __call__(self, event: Event) -> None:
        if event.kind == "note" and not event.message.startswith("warning: "):  # the trainer's run has shown those
            self.crew.tell(self.number, event.message)

    def set_price(self, usd_per_hour: float | None) -> None:
        pass

    def ask(self, question: str, yes: bool) -> bool:
        return yes

    def show_detached(self) -> None:
        pass

    def show_result(self, result: FinishedRun, *, again: bool = False, cost: str = "") -> None:
        pass


class Crew:
    """The pods of samplers of one run, while one controller drives it."""

    def __init__(self, options: RunOptions, plan: Plan, plans: Sequence[Plan], context: Context) -> None:
        """Prepare the threads without starting any.

        Args:
            options: those of the trainer's run.
            plan: that of the trainer's run.
            plans: that of each pod of samplers.
            context: the trainer's.
        """
        self._plan, self._plans, self._context = plan, dict(enumerate(plans, 1)), context
        self._options = RunOptions(options.overrides, yes=True, detach=options.detach)
        account = Account(1 + len(plans), price_of_pods(plan.config, context.clock.now()).total)
        self._spending = {
            one.run_id: Spending(context.google, context.clock, one.bucket, one.run_id, one.config, account)
            for one in (plan, *plans)
        }
        self._threads: dict[int, threading.Thread] = {}
        self._contexts: list[Context] = []
        self._lock, self._leaving = threading.Lock(), threading.Event()

    def spending_of(self, plan: Plan) -> Spending:
        """Return the account of the trainer's run or of a run of samplers; they share a budget."""
        return self._spending[plan.run_id]

    def close_vanished(self) -> None:
        """End the time of pods of the run that vanished while no controller looked, before the budget is checked."""
        for plan in (self._plan, *self._plans.values()):
            self.spending_of(plan).close_vanished(self._context, plan.node)

    @property
    def was_started(self) -> bool:
        """Whether this controller has launched an attempt of the trainer, or re-attached to one."""
        return bool(self._threads)

    def __call__(self, event: Event) -> None:
        """Start the threads that do not run when an attempt of the trainer has been launched; end the pods with it."""
        if event.subject != self._plan.run_id:
            return
        if event.data.get("ended"):  # and its record waits for the bucket
            threading.Thread(target=self.end, args=("the trainer's run has ended",), name="samplers-end").start()
        if not event.data.get("launched"):
            return
        for number in self._plans:
            if (known := self._threads.get(number)) is None or not known.is_alive():
                thread = threading.Thread(target=self._drive, args=(number,), daemon=True, name=f"samplers-{number}")
                self._threads[number] = thread
                thread.start()

    def tell(self, number: int, message: str) -> None:
        self._context.events.note(self._plan.run_id, f"sampler pod {number}: {message}")

    @contextmanager
    def left_on_exit(self) -> Iterator[None]:
        """Stop driving the pods when the context ends; what runs there goes on."""
        try:
            yield
        finally:
            self._leave()

    def join(self, seconds: float | None) -> None:
        """Wait until no pod is driven any more, for at most that long."""
        late = None if seconds is None else time.monotonic() + seconds
        for thread in list(self._threads.values()):
            thread.join(None if late is None else max(0.0, late - time.monotonic()))

    def finish(self) -> None:
        """Let the samplers of a finished run end by themselves, and end those that do not."""
        if self.was_started:
            self._context.events.note(self._plan.run_id, "waiting for the pods of samplers to end")
        self.join(FINISH_SECONDS)
        self.end("the trainer's run has finished")

    def end(self, why: str, *, only_idle: bool = False) -> None:
        """Delete the pods that are there; what cannot be deleted is reported, and hides no error of the run.

        Args:
            why: for the record.
            only_idle: leave pods to whoever acts on them, as always if this controller has never driven them.
        """
        self._leave()
        for number, plan in self._plans.items():
            self._end(number, plan, self._context, why, only_idle=only_idle or not self.was_started)

    def _end(self, number: int, plan: Plan, context: Context, why: str, *, only_idle: bool) -> None:
        try:
            if end_pod(plan, context, why, only_idle=only_idle):
                self.tell(number, f"deleted: {why}")
        except (InterruptedSleepError, *ELSEWHERE):
            self.tell(number, f"{plan.node.name} is left to the command that has taken it over")
        except SlipwayError as error:
            self.tell(number, f"{plan.node.name} was not deleted ({error}); `slipway down` deletes it")

    def _leave(self) -> None:
        with self._lock:
            self._leaving.set()
            contexts = list(self._contexts)
        for context in contexts:
            context.clock.interrupt()
        self.join(SHUTDOWN_SECONDS)

    def _drive(self, number: int) -> None:
        plan = self._plans[number]
        try:
            with open_context(plan.config, keep_awake=True) as (context, emulator):
                with self._lock:
                    if self._leaving.is_set():
                        return
                    self._contexts.append(context)
                self._drive_in(context, emulator, number, plan)
        except BaseException as error:  # the trainer goes on without this pod
            if not self._leaving.is_set():
                self.tell(number, f"not driven any more: {type(error).__name__}: {error}")

    def _drive_in(self, context: Context, emulator: Emulator | None, number: int, plan: Plan) -> None:
        screen = _Screen(self, number)
        try:
            running.drive(self._options, plan, context, emulator, screen, spending=self.spending_of(plan))
        except ELSEWHERE:
            raise
        except SlipwayError as error:
            if self._leaving.is_set():
                raise
            self.tell(number, f"given up until the trainer's next attempt: {str(error).partition(chr(10))[0]}")
            self._end(number, plan, context, "its samplers were given up", only_idle=False)

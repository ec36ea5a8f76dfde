"""The end of a run: first the pod, whatever the bucket says, then the records.

While a program runs, its controller waits for a bucket that does not answer. Once it has ended there is nothing to wait
for: the pod is deleted if the policy says so, and the records are tried again for some minutes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from conf.strict_json import restored
from controller.context import Context
from controller.core.errors import LeaseLostError, OverBudgetError, SlipwayError
from controller.core.text import object_url
from controller.gcp.google_errors import GoogleError
from controller.gcp.outages import outlast, retry_for_minutes
from controller.lease import Lease, LeaseHeldError, lease_guard
from controller.plan.build import Plan
from controller.reconcile import destroy
from controller.records.ledger import Ledger, Result
from controller.records.spending import Spending
from controller.records.unfinished import (
    ResultNotRecordedError,
    forget_result,
    keep_result,
    kept_file,
    note_in_table,
    record_result,
)
from controller.resources.pod.node import Node
from controller.run.attempt import AttemptResult
from controller.run.launch import QueueWaiter, running_runs, stop

T = TypeVar("T")


@dataclass
class Ending:
    """Ends what one run is billed for, and records how the run ended."""

    plan: Plan
    context: Context
    ledger: Ledger
    spending: Spending
    waiter: QueueWaiter
    lease: Lease
    confirm: Callable[[], object]
    """Confirms that this controller may act and finish the run, as `Lease.ensure`."""
    is_handed_over: bool = False
    """Whether the pod was left to runs that wait for it."""

    def finish(self, attempt: AttemptResult) -> Result:
        """End a run whose program has ended well.

        Raises:
            ResultNotRecordedError: the bucket has not taken the result; this machine keeps it.
            LeaseLostError: another controller has the run.
        """
        result, problem = self._result_of(attempt), None
        keep_result(self.context, result, ())
        try:
            self.confirm()
            result = record_result(self.ledger, result)
            forget_result(self.context, result.run_id)
        except LeaseLostError:
            forget_result(self.context, result.run_id)
            raise
        except GoogleError as error:
            problem = error
            self.context.google.hurry()
        deleted = self.clean_up(result)
        if problem is not None:
            keep_result(self.context, result, self.spending.lifetimes())
            result = self._record_late(result, problem, "; its pod is deleted" if deleted else "")
            forget_result(self.context, result.run_id)
        return result

    def _result_of(self, attempt: AttemptResult) -> Result:
        assert attempt.outcome is not None, "a run that was followed to its end"
        ended = self.context.clock.now()
        ends = sorted(attempt.outcome.ends)
        summary: dict[str, Any] = restored(next((end["summary"] for _, end in ends if end["summary"]), {}))
        seconds = round(max(0.0, ended - attempt.launched), 1)
        cleanup = self.plan.config.cleanup.on_success
        return Result(self.plan.run_id, "finished", attempt.number, ended, seconds, summary, cleanup)

    def _record_late(self, result: Result, problem: GoogleError, pod: str) -> Result:
        """Try for some minutes to record the result of a run whose pod is not waiting for it."""
        bucket, file = object_url(self.plan.bucket), kept_file(self.context.state_dir, result.run_id)

        def record() -> Result:
            whole = record_result(self.ledger, result)
            self.spending.write_ends()
            return whole

        message = f"the program has finished{pod}. {bucket} has not taken the result: {problem.message}"
        self.context.events.note(self.plan.run_id, message, ended=True)
        try:
            return retry_for_minutes(self.context.clock, record)
        except GoogleError as error:
            note_in_table(self.context, result)
            kept = f"could not be kept in {file}: the same command resumes from the last checkpoint"
            if file.is_file():
                kept = f"is kept in {file}: `slipway status` or the same command writes it once the bucket does, and "
                kept += "runs nothing again"
            raise ResultNotRecordedError(
                f"{self.plan.run_id} has finished{pod}, but {bucket} has not taken its result: {error}. It {kept}"
            ) from error

    def clean_up(self, result: Result) -> bool:
        """Delete the pod if the policy says so, the finished run still owns it and no other waits for it.

        Returns whether it was deleted. Nobody takes the pod while we look and delete: we have the lease.
        """
        if result.cleanup != "delete" or (node := self._outlast(self.own_pod)) is None:
            return False
        if not self.lease.held:  # this controller cleans up after another one
            try:
                self.lease.ensure()
            except LeaseHeldError:
                return False
            self.spending.reload()
            if (node := self._outlast(self.own_pod)) is None:
                return False
        return not self._is_left(node) and self._delete("finished")

    def _delete(self, why: str) -> bool:
        self._outlast(self.delete_pod)
        self.close_billing(why)
        return True

    def _is_left(self, node: Node | None) -> bool:
        """Return whether the pod is left to other runs: those that wait for it or, without the bucket, are on it."""
        try:
            next_runs = self.waiter.queue.waiting_runs(but=self.plan.run_id)
            self.is_handed_over = bool(next_runs)
        except GoogleError:
            next_runs = list[str]()
            with suppress(SlipwayError):
                if node is not None and node.is_ready:
                    next_runs = sorted(running_runs(node.fleet(self.context)) - {self.plan.run_id})
        if next_runs:
            self._note(f"the pod stays for the next run: {', '.join(next_runs)}")
        return bool(next_runs)

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """At the end, see that a pod which was left to the next run is taken.

        It is deleted if the runs that waited leave or die instead. By then nothing of this run is held any more.
        """
        try:
            yield
        except SlipwayError as error:
            self._hand_over(str(error), error.exit_code)
            raise
        self._hand_over("finished", 0)

    def _hand_over(self, said: str, exit_code: int) -> None:
        """Wait for the next run; `said` and `exit_code` tell how this one ended."""
        if not self.is_handed_over:
            return
        self._note("this command ends once the next run has the pod, or deletes the pod if none takes it")
        try:
            with lease_guard(self.lease, self.plan, self.context):
                while self.is_handed_over and not self.waiter.is_followed():
                    self.lease.ensure()
                    self.spending.reload()
                    self.is_handed_over = False
                    if (node := self.own_pod()) is not None and not self._is_left(node):
                        self._note("no run waits for the pod any more")
                        self._delete("no run waits for it")
                    self.lease.release(said, exit_code)
        except (LeaseHeldError, LeaseLostError):
            return  # it is taken
        except GoogleError as error:
            self._note(f"cannot see whether the pod is taken ({error}); `slipway orphans` lists what is billed")

    def own_pod(self) -> Node | None:
        """Return the pod, in whatever state, if it exists and this run is billed for it; a refusal is no absence."""
        billed = {life.uid for life in self.spending.lifetimes() if life.ended is None}
        node = self.plan.node.find(self.context, billed, surely=bool(billed))
        return node if node is not None and node.status.uid in billed else None

    def delete_pod(self) -> None:
        """Delete the pod, unless it was adopted. Raises LeaseLostError if another controller has it."""
        if not self.plan.node.adopt:
            with self._without_bucket():
                destroy([replace(self.plan.node, depends_on=())], self.context)

    @contextmanager
    def _without_bucket(self) -> Iterator[None]:
        """While open, a lease that we held counts if the bucket does not answer: nobody else is told that it is free.

        A refusal of our requests alone is told from that by the workers, in `_is_left`.
        """
        before, answers = self.context.before_pod_write, True

        def confirm() -> int:
            nonlocal answers
            self.lease.raise_if_lost()
            if answers:
                try:
                    return before()
                except GoogleError:
                    answers = False
            return self.lease.last_token

        self.context.before_pod_write = self.context.google.before_pod_write = confirm
        try:
            yield
        finally:
            self.context.before_pod_write = self.context.google.before_pod_write = before

    def give_up(self) -> None:
        """Delete the pod of a run that has failed, and end its time on record, unless another run waits for it."""
        if not self._is_left(None):
            self.delete_pod()
            self.close_billing("failed")

    def close_billing(self, why: str) -> None:
        """Record that the pod's time has ended; a bucket that does not take it ends nothing else."""
        try:
            self.spending.close_billing(why)
        except GoogleError as error:
            self._note(f"warning: the end of the pod's time is not on record: {error}")

    def end_over_budget(self, why: str) -> NoReturn:
        """Stop the program and delete the pod, if the run has one; saved files and an adopted pod stay."""
        self.context.google.hurry()
        if (node := retry_for_minutes(self.context.clock, self.own_pod)) is not None:
            self._note(f"over budget: {why}; ending the run and deleting its pod")
            with self._without_bucket():
                self.context.before_pod_write()
                self._stop(node)
            self.delete_pod()
        self.close_billing("over budget")
        results = object_url(self.plan.bucket, self.ledger.prefix)
        raise OverBudgetError(
            f"{self.plan.run_id} was ended: {why}. Spent: {self.spending.account.usage()}. Raise the limit and run the "
            f"same command to resume from the last checkpoint; results: {results}"
        )

    def _stop(self, node: Node) -> None:
        """Stop the program; what goes wrong is noted, since the pod is deleted next, unless it was adopted."""
        try:
            self.ledger.record_cancellation()
        except GoogleError as error:
            self._note(f"warning: the end of the program is not on record: {error}")
        try:
            if node.is_ready:
                stop(node.fleet(self.context), self.plan.run_id)
        except SlipwayError as error:
            if node.adopt:
                raise
            self._note(f"warning: the program was not stopped first: {error}")

    def _outlast(self, act: Callable[[], T]) -> T:
        hours = self.plan.config.checkpoint.max_outage_hours
        return outlast(self.context.clock, act, "Google's API", self._note, hours)

    def _note(self, message: str) -> None:
        self.context.events.note(self.plan.run_id, message)

"""The end of a run: first the pod, whatever the bucket says, then the records.

While a program runs, its controller waits for a bucket that does not answer. Once it has ended there is nothing to wait
for: the pod is deleted if the policy says so, and the records are tried again for some minutes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from conf.strict_json import restored
from controller.context import Context
from controller.core.errors import LeaseLostError, OverBudgetError, SlipwayError
from controller.core.text import object_url
from controller.gcp.google_errors import GoogleError
from controller.gcp.outages import outlast, retry_for_minutes
from controller.lease import Lease
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
from controller.run.launch import PodQueue, running_runs, stop


@dataclass
class Ending:
    """Ends what one run is billed for, and records how the run ended."""

    plan: Plan
    context: Context
    ledger: Ledger
    spending: Spending
    queue: PodQueue
    lease: Lease
    confirm: Callable[[], object]
    """Confirms that this controller may act and finish the run, as `Lease.ensure`."""

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
        """Delete the pod if the policy says so and the finished run still owns it; return whether it was deleted."""
        hours = self.plan.config.checkpoint.max_outage_hours
        if result.cleanup != "delete":
            return False
        if (node := outlast(self.context.clock, self.own_pod, "Google's API", self._note, hours)) is None:
            return False
        if next_runs := self._next_runs(node):
            self._note(f"the pod stays for the next run: {', '.join(next_runs)}")
            return False
        outlast(self.context.clock, self.delete_pod, "Google's API", self._note, hours)
        self.close_billing("finished")
        return True

    def _next_runs(self, node: Node) -> list[str]:
        """Return the runs that wait for the pod; if the bucket does not say, those that are on it already."""
        try:
            return self.queue.waiting_runs()
        except GoogleError:
            pass
        try:
            return sorted(running_runs(node.fleet(self.context)) - {self.plan.run_id}) if node.is_ready else []
        except SlipwayError:
            return []

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

        A refusal of our requests alone is told from that by the workers, in `_next_runs`.
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
        """Delete the pod of a run that has failed, and end its time on record."""
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

    def _note(self, message: str) -> None:
        self.context.events.note(self.plan.run_id, message)

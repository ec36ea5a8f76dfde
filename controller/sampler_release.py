"""End pods of samplers: those of one run, and those of runs that it has replaced on the trainer's pod."""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from controller.connect import open_context
from controller.context import Context
from controller.core.errors import SlipwayError
from controller.core.events import Event
from controller.core.json_documents import UnreadableError
from controller.core.text import object_url
from controller.core.this_process import InterruptedSleepError
from controller.gcp.google_errors import GoogleError, ServiceDisabledError
from controller.lease import Lease, LeaseHeldError, lease_guard, pod_lease
from controller.plan.build import Plan
from controller.plan.samplers import sampler_plans
from controller.reconcile import Absent, Pending, destroy
from controller.records.ledger import Ledger
from controller.records.recorder import RECORD_FILE, Recorder, RunRecord, read_run_record
from controller.records.restore import plan_from_record, recorded_config
from controller.records.spending import Spending, close_billing, read_claim
from controller.resources.pod.node import Node
from controller.run.launch import running_runs

RIVALS = 3
"""Controllers that may acquire a lease first before we give up."""


def end_pod(plan: Plan, context: Context, why: str, *, only_own: bool = True, only_idle: bool = False) -> bool:
    """End a run of samplers and delete its pod; return whether there was anything to end.

    Args:
        plan: that of the run of samplers.
        context: any context of its project.
        why: for the record.
        only_own: leave a pod that another run uses by now: pods of equal configs have the same names.
        only_idle: leave a pod to the controller that drives it.

    Raises:
        LeaseLostError: another controller has taken the pod over in the meantime.
        LeaseHeldError: several others were faster.
    """
    lease = pod_lease(plan, context)
    context.google.hurry()
    try:
        seen = plan.observe_pod(context)
    except ServiceDisabledError:
        return False  # without the API there is no pod
    try:
        return _end_seen(plan, context, lease, seen, why, only_own=only_own, only_idle=only_idle)
    except GoogleError as error:  # of the bucket, or of the deletion, which is tried again then
        return not only_idle and _delete_without_bucket(plan, context, seen, error, only_own=only_own)


def _end_seen(
    plan: Plan, context: Context, lease: Lease, seen: Absent | Pending | Node, why: str, *, only_own: bool,
    only_idle: bool,
) -> bool:  # fmt: skip
    """End a run on a pod as it was seen. Arguments and result as of `end_pod`."""
    other = lease.current_other()
    if isinstance(seen, Absent) and other is None:
        return False
    if only_idle and other is not None:
        return False
    if only_own and _user_of(plan, seen, lease, context) != plan.run_id:
        return False
    try:
        with lease_guard(lease, plan, context):
            if only_idle:
                lease.ensure()
            _end_and_delete(plan, context, lease, why)
    except LeaseHeldError:
        if only_idle:
            return False  # a controller has acquired it since
        raise
    except InterruptedSleepError:
        lease.raise_if_lost()  # the controller that fences us wakes us up
        raise
    return True


def _delete_without_bucket(
    plan: Plan, context: Context, seen: Absent | Pending | Node, error: GoogleError, *, only_own: bool
) -> bool:
    """Delete a pod whose lease cannot be read; return whether there was one.

    Raises CloudError if another run may use it, as its workers say, or do not say.
    """
    if isinstance(seen, Absent):
        return False
    if only_own and isinstance(seen, Node) and seen.is_ready:
        try:
            others = running_runs(seen.fleet(context)) - {plan.run_id}
        except SlipwayError:
            raise error from None
        if others:
            return False
    destroy([replace(plan.node, depends_on=())], context)
    context.events.note(plan.run_id, f"warning: the end of its pod's time is not on record: {error}")
    return True


def _end_and_delete(plan: Plan, context: Context, lease: Lease, why: str) -> None:
    ledger = Ledger(context.google, plan.bucket, plan.run_id)
    ledger.record_cancellation()  # its follower must not take this for a preemption
    _take_over(lease, f"deleted: {why}")
    current = plan.node.find(context)
    if current is not None and current.is_managed:
        close_billing(context, plan.bucket, plan.config, current, why)
    destroy([replace(plan.node, depends_on=())], context)
    spending = Spending(context.google, context.clock, plan.bucket, plan.run_id, plan.config)
    try:
        Recorder(plan, context, ledger, ()).record_stop("cancelled", why, spending)
    except GoogleError as error:
        context.events.note(plan.run_id, f"warning: the end of the run is not on record: {error}")
    lease.release(f"deleted: {why}", 0)


def _take_over(lease: Lease, why: str) -> None:
    """Acquire the lease, whoever holds it; `cancel` and the controller that it ends may both want the pod deleted."""
    for _ in range(RIVALS):
        with suppress(LeaseHeldError):
            lease.take_over(why)
            return
    lease.take_over(why)


def end_pods(plan: Plan, context: Context, why: str, *, only_own: bool = True, keep: Collection[str] = ()) -> list[str]:
    """End all runs of samplers of a run, as `end_pod` does, but for pods to keep, by name.

    Returns:
        What could not be ended, and why.
    """
    problems: list[str] = []
    for one in sampler_plans(plan, Path.cwd()):
        if one.node.name in keep:
            continue
        try:
            end_pod(one, context, why, only_own=only_own)
        except SlipwayError as error:
            problems.append(f"{one.node.name}: {error}")
    return problems


def _user_of(plan: Plan, seen: Absent | Pending | Node, lease: Lease, context: Context) -> str:
    """Return the run that uses the pod, or tries to get it; '' if nobody can tell."""
    if isinstance(seen, Node):
        try:
            if claim := read_claim(context.google, plan.bucket, plan.node.name, seen.status.uid):
                return claim["latest"]
        except UnreadableError:
            pass  # the lease tells, too
    snapshot = lease.read()
    return "" if snapshot is None else snapshot.record.run_id


class ReplacedRuns:
    """Listens for runs that this one stops, and ends their pods of samplers, each run's in a thread of its own."""

    def __init__(self, plan: Plan, keep: Collection[str], context: Context) -> None:
        """Listen to nothing yet.

        Args:
            plan: that of the run that replaces others.
            keep: names of its own pods of samplers, which take over those of the same name.
            context: its context.
        """
        self._plan, self._keep, self._context = plan, keep, context
        self._threads: list[threading.Thread] = []

    @contextmanager
    def ended_on_exit(self) -> Iterator[None]:
        """Listen while the context is open; its end waits until the pods are deleted."""
        self._context.events.add_listener(self)
        try:
            yield
        finally:
            if any(thread.is_alive() for thread in self._threads):
                self._context.events.note(self._plan.run_id, "waiting for another run's pods of samplers to be deleted")
            for thread in self._threads:
                thread.join()

    def __call__(self, event: Event) -> None:
        if event.subject == self._plan.run_id and (other := event.data.get("stopped")):
            thread = threading.Thread(target=self._end, args=(other,), daemon=True, name=f"samplers-of-{other}")
            self._threads.append(thread)
            thread.start()

    def _end(self, run_id: str) -> None:
        try:
            with open_context(self._plan.config, keep_awake=True) as (context, _):
                other = self._plan_of(run_id, context)
                if other is None:
                    return
                why = f"{self._plan.run_id} has replaced its run"
                problems = end_pods(other, context, why, keep=self._keep)
        except SlipwayError as error:
            problems = [f"pods of samplers of {run_id}: {error}"]
        for problem in problems:
            hint = "they end by themselves within about an hour; `slipway orphans` lists what is billed"
            self._context.events.note(self._plan.run_id, f"not deleted: {problem}; {hint}")

    def _plan_of(self, run_id: str, context: Context) -> Plan | None:
        """Return the plan of a run from its record; None if it has no pods of samplers to end.

        Raises SlipwayError if the record is damaged.
        """
        bucket, state = self._plan.bucket, Path(self._plan.config.run.state_dir).expanduser()
        content = Ledger(context.google, bucket, run_id).read(RECORD_FILE)
        if content is None:
            return None
        document = read_run_record(content, object_url(bucket, f"runs/{run_id}/{RECORD_FILE}"), run_id, bucket)
        if document["project"] != context.project or not _has_sampler_pods(document):
            return None
        return plan_from_record(document, recorded_config(document, Path.cwd()), context.google, state, drives=False)


def _has_sampler_pods(document: RunRecord) -> bool:
    """Return whether a record, perhaps of an older version, has pods of samplers."""
    sampler = (document["config"].get("loop") or {}).get("sampler") or {}
    return bool(sampler.get("pods"))

"""Cancel a run: its programs on the pod, and the controllers that drive it or are about to."""

from collections.abc import Callable
from dataclasses import dataclass

from controller.core.errors import CloudError, SlipwayError
from controller.lease import Lease, run_lease
from controller.reconcile import Absent
from controller.records.ledger import record_cancellations
from controller.resources.bastion_vm import Bastion
from controller.run.driven_here import end_starting, run_lock
from controller.run.launch import running_runs, stop
from controller.run.session import Session

RECORD_SECONDS = 20.0
"""How long a controller gets to end by the record of the cancelled attempt, before its lease is asked for."""


@dataclass(frozen=True)
class Cancellation:
    """What was found once nothing of the run was left to end.

    Attributes:
        cancelled: whether the run was ended before it had finished.
        finished: whether it has a result.
        running: the runs on the pod.
        pod_is_there: whether a pod stays.
        problem: that a controller of the run goes on, and what keeps it from learning of the end; "" if nothing does.
    """

    cancelled: bool
    finished: bool
    running: frozenset[str]
    pod_is_there: bool
    problem: str


def cancel_run(session: Session, tell: Callable[[str], object]) -> Cancellation:
    """End the session's run wherever it runs, and whoever drives it; return what is found at the end.

    The controller learns of it through the bucket: from the record of the cancelled attempt, or, if nothing has started
    yet, from a request for the lease. A program that it starts until it has read that is ended too.
    """
    problems: list[str] = []
    was_running, running = _end_on_workers(session, problems)
    had_controller = False
    try:
        context, run_id = session.context, session.plan.run_id
        lease = run_lease(session.plan, context)
        found = end_starting(context, lease, run_lock(context, run_id), run_id, "cancelled")
        patience = context.clock.deadline(RECORD_SECONDS if was_running and not problems else 0.0)
        while lease.current_other() is not None:
            found = True
            if patience():
                lease.await_release("cancelled", tell)
            else:
                context.clock.sleep(min(1.0, context.poll_seconds))
        had_controller = _end_booting_bastion(session, lease) or found
    except CloudError as error:
        problems.append(str(error))
    if had_controller:
        started, running = _end_on_workers(session, problems)
        was_running = was_running or started
    try:
        finished = session.ledger.result() is not None
    except SlipwayError:  # it is damaged, or the bucket does not answer
        finished = False
    cancelled = (was_running or had_controller) and not finished
    pod_is_there = session.plan.config.cloud.kind != "here" and not isinstance(session.node(), Absent)
    told = f"a controller that drives {session.plan.run_id} goes on with it, for it was not told: "
    return Cancellation(cancelled, finished, frozenset(running), pod_is_there, told + problems[0] if problems else "")


def _end_booting_bastion(session: Session, lease: Lease) -> bool:
    """Delete a bastion that was given the run and has not held its lease; return whether there was one."""
    bastions = [one for one in session.plan.resources if isinstance(one, Bastion)]
    if not bastions or ((last := lease.read()) is not None and last.record.driver == "bastion"):
        return False  # one that did hold it deletes itself at its end
    found = [one for one in bastions if one.is_for_its_run(session.context)]
    for bastion in found:
        bastion.destroy(session.context)
    return bool(found)


def _end_on_workers(session: Session, problems: list[str]) -> tuple[bool, set[str]]:
    """End the session's run where it runs; return whether it did, and all runs on the pod.

    What keeps its controller from learning that is added to `problems`.
    """
    run_id, fleet = session.plan.run_id, session.fleet()
    running = running_runs(fleet) if fleet is not None else set[str]()
    if fleet is None or run_id not in running:
        return False, running
    problems += record_cancellations(session.context, session.plan.bucket, [run_id])
    stop(fleet, run_id)
    return True, running

"""Pods of a sweep: the run assigned to each, recorded in the bucket, and their deletion."""

from contextlib import suppress
from dataclasses import replace

from controller.agent.protocol import OBSERVE
from controller.context import Context
from controller.core.formats import dump, load
from controller.gcp.client import GoogleClient
from controller.gcp.errors import GoogleError, NotFoundError
from controller.lease.lease import Lease, LeaseHeldError, lease_guard, pod_lease
from controller.plan.build import Plan
from controller.reconcile.reconciler import destroy
from controller.records.ledger import record_cancellations
from controller.records.spending import close_billing
from controller.resources.pod.node import Node
from controller.resources.workers.worker import active_runs
from controller.run.queue import PodQueue


def record_assignment(google: GoogleClient, bucket: str, sweep_id: str, pod: int, run_id: str) -> None:
    google.upload(bucket, f"sweeps/{sweep_id}/pods/{pod}.json", dump({"pod": pod, "run": run_id}).encode())


def load_assignments(google: GoogleClient, bucket: str, sweep_id: str) -> dict[int, str]:
    where = {"bucket": bucket, "prefix": f"sweeps/{sweep_id}/pods/"}
    try:
        items = list(google.list_all("storage", "objects.list", "items", **where))
    except NotFoundError:
        return {}
    found = [load(google.download(bucket, item["name"]), item["name"]) for item in items]
    return {entry["pod"]: entry["run"] for entry in found}


def managed_node(plan: Plan, context: Context) -> Node | None:
    """Return the pod if it exists and Slipway created it."""
    current = plan.observe_pod(context)
    return current if isinstance(current, Node) and current.is_managed and not plan.node.adopt else None


def running_runs(node: Node, context: Context) -> set[str]:
    """Return the runs whose program is alive on the pod, as far as its workers answer."""
    if not node.is_ready or not node.accepts_our_key(context):
        return set()
    return active_runs(node.fleet(context).call_all(OBSERVE, {}))


def delete_if_unused(plan: Plan, context: Context, why: str) -> None:
    """Delete the pod unless another run uses it or waits for it."""
    context.google.hurry()
    lease = pod_lease(plan, context)
    try:
        if PodQueue(context.google, context.clock, plan.bucket, plan.node.name).waiting_runs():
            return
        _delete_if_idle(plan, context, lease, why)
    except GoogleError as error:
        current = managed_node(plan, context)
        if current is not None and not running_runs(current, context):
            _delete_without_bucket(plan, context, error)


def _delete_if_idle(plan: Plan, context: Context, lease: Lease, why: str) -> None:
    """Delete the pod under its lease unless a run uses it."""
    with suppress(LeaseHeldError), lease_guard(lease, plan, context):
        if (
            (current := managed_node(plan, context)) is not None
            and lease.current_other() is None
            and not running_runs(current, context)
        ):
            _delete_under_lease(plan, current, context, lease, why)


def force_delete(plan: Plan, context: Context, node: Node) -> None:
    """Delete the pod whatever runs there, after its controller has released the lease."""
    context.google.hurry()
    # a follower must not take this for a preemption
    record_cancellations(context.google, plan.bucket, running_runs(node, context))
    lease = pod_lease(plan, context)
    try:
        with lease_guard(lease, plan, context):
            lease.take_over("deleted")
            _delete_under_lease(plan, node, context, lease, "deleted by down")
            lease.release("deleted by down", 0)
    except GoogleError as error:
        _delete_without_bucket(plan, context, error)


def _delete_without_bucket(plan: Plan, context: Context, error: GoogleError) -> None:
    """Delete the pod although the bucket does not answer; or again, if it was Google's answer to the deletion."""
    context.events.note(plan.run_id, f"warning: the end of the pod's time is not on record: {error}")
    destroy([replace(plan.node, depends_on=())], context)


def _delete_under_lease(plan: Plan, node: Node, context: Context, lease: Lease, why: str) -> None:
    """Delete the pod under its lease and close its cost account."""
    lease.ensure()
    close_billing(context, plan.bucket, plan.config, node, why)
    destroy([replace(plan.node, depends_on=())], context)

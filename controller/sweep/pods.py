"""The pods of a sweep: which run each has, on record in the bucket, and how they go."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from controller.agent.protocol import OBSERVE
from controller.context import Context
from controller.core.formats import dump, load
from controller.gcp.client import Google, NotFound
from controller.lease.lease import Held, Lease
from controller.lease.scope import lease_of, working_under
from controller.plan.build import Plan
from controller.reconcile.reconciler import destroy
from controller.records.ledger import Ledger
from controller.records.spending import let_go
from controller.resources.pod.node import Node
from controller.resources.workers.base import active_runs
from controller.run.queue import Turns


def record(google: Google, bucket: str, sweep_id: str, pod: int, run_id: str) -> None:
    """The pod has this run from now on."""
    google.upload(bucket, f"sweeps/{sweep_id}/pods/{pod}.json", dump({"pod": pod, "run": run_id}).encode())


def recorded(google: Google, bucket: str, sweep_id: str) -> dict[int, str]:
    """By pod the run that it had last."""
    where = {"bucket": bucket, "prefix": f"sweeps/{sweep_id}/pods/"}
    try:
        items = list(google.pages("storage", "objects.list", "items", **where))
    except NotFound:
        return {}
    found = [load(google.download(bucket, item["name"]), item["name"]) for item in items]
    return {entry["pod"]: entry["run"] for entry in found}


def own(plan: Plan, world: Context) -> Node | None:
    """The pod if it is there and slipway has made it."""
    seen = plan.observe_pod(world)
    return seen if isinstance(seen, Node) and seen.ours and not plan.node.adopt else None


def runs_on(node: Node, world: Context) -> set[str]:
    """The runs whose program is alive there, as far as its workers can be asked."""
    if not node.is_ready or not world.lets_us_in(node):
        return set()
    return active_runs(world.fleet(node).call_all(OBSERVE, {}))


def delete_unused(plan: Plan, world: Context, why: str) -> None:
    """Delete the pod, unless somebody else uses it, or waits for it."""
    if Turns(world.google, world.clock, plan.bucket, plan.node.name).waiting():
        return
    lease = lease_of(plan, world)
    with suppress(Held), working_under(lease, plan, world):
        if (seen := own(plan, world)) is not None and lease.look() is None and not runs_on(seen, world):
            _delete(plan, seen, world, lease, why)


def delete_used(plan: Plan, world: Context, node: Node) -> None:
    """Delete the pod whatever happens there: whoever sees to it lets go first."""
    for run_id in runs_on(node, world):  # whoever follows it must not take this for a preemption
        Ledger(world.google, plan.bucket, run_id).cancel()
    lease = lease_of(plan, world)
    with working_under(lease, plan, world):
        lease.take_over("deleted")
        _delete(plan, node, world, lease, "deleted by down")
        lease.release("deleted by down", 0)


def _delete(plan: Plan, node: Node, world: Context, lease: Lease, why: str) -> None:
    """Under its lease, and the account of its costs with it."""
    lease.hold()
    let_go(world.google, world.clock, plan.bucket, plan.config, node, why)
    destroy([replace(plan.node, needs=())], world)

"""`slipway down`: delete the pod; with --all also what pods share. Only resources made by Slipway are deleted."""

import json
from collections.abc import Sequence
from dataclasses import replace

from controller.agent.protocol import OBSERVE
from controller.cleanup.dependents import dependents, resources_in_other_regions
from controller.cli.main import Command
from controller.cli.view import View
from controller.core.errors import CloudError, ConfigError, SlipwayError
from controller.core.ui import confirm
from controller.gcp.client import ForbiddenError, NotFoundError
from controller.gcp.names import is_labelled
from controller.lease.lease import Lease, pod_lease
from controller.plan.preview import ResourcePreview, preview_resources
from controller.reconcile.reconciler import destroy
from controller.reconcile.resource import Absent, Pending, Resource, Unknown
from controller.records.ledger import Ledger
from controller.records.spending import close_billing
from controller.resources.bastion.vm import Bastion
from controller.resources.pod.node import Node
from controller.resources.project.bucket import Bucket
from controller.resources.project.services import Services
from controller.resources.workers.base import active_runs
from controller.run.session import Session, open_session

BUCKET_STAYS = (
    "gs://{} stays, with results of runs elsewhere; to delete it, run `down --all` with their tpu.zone or cloud.bucket"
)


def run(command: Command) -> int:
    with open_session(command.options) as session:
        everything, notes = command.flags.all, list[str]()
        rows = [row for row in _observe(session, everything, notes) if not isinstance(row.observed, Absent | Unknown)]
        present = [row.resource for row in rows if _will_be_deleted(row, everything)]
        running = _affected_runs(session, notes)
        if everything:
            _refuse_if_used(session, present)
        if (present or running) and (everything or running) and not _confirm(command, present, running):
            names = f"{', '.join(sorted(running))} is running on the pod; " if running else ""
            raise ConfigError(f"nothing was deleted; {names}pass --yes to skip the prompt")
        lease = pod_lease(session.plan, session.context)
        with View(session.plan, json_lines=command.flags.json) as view, lease.released_on_exit():
            session.context.events.add_listener(view)
            try:
                nodes = [row.observed for row in rows if isinstance(row.observed, Node) and row.resource in present]
                _record_end(session, lease, nodes, running)
            except (ForbiddenError, NotFoundError) as error:  # a pod must be deletable without its bucket
                notes.append(f"the bucket cannot be used, so this is not on record: {error}")
            for message in notes:
                session.context.events.note(session.plan.node.id, message)
            destroy(_with_dependencies(present), session.context)
            lease.release("deleted by down", 0)
        kept = [row for row in rows if row.resource not in present and row.resource.scope == "shared"]
        others = _other_buckets(session) if everything else []
        undo = session.plan.get(Services).disable_command(session.context)
    if command.flags.json:
        kept_ids = [row.resource.id for row in kept]
        deleted = [r.id for r in present]
        print(json.dumps({"deleted": deleted, "kept": kept_ids, "other_buckets": others, "undo": [undo]}))
    else:
        print("\n".join([*_summary_lines(present, kept, undo, everything), *map(BUCKET_STAYS.format, others)]))
    return 0


def _record_end(session: Session, lease: Lease, nodes: list[Node], running: set[str]) -> None:
    """Record in the bucket that the runs and the pod end, so that no controller takes this for a preemption."""
    google, clock, plan = session.context.google, session.context.clock, session.plan
    for run_id in running:
        Ledger(google, plan.bucket, run_id).record_cancellation()
    if nodes or lease.current_other() is not None:
        lease.take_over("deleted", lambda message: session.context.events.note(plan.run_id, message))
    for node in nodes:
        close_billing(google, clock, plan.bucket, plan.config, node, "deleted by down")


def _observe(session: Session, everything: bool, notes: list[str]) -> list[ResourcePreview]:
    """Return the pod and shared resources as they are now, each observed by itself."""
    pod = [r for r in session.plan.resources if r.id == session.plan.node.id or isinstance(r, Bastion)]
    shared = [r for r in session.plan.resources if r.scope == "shared" and r not in pod]
    if not everything:
        rows = _observe_each(session, pod)
        try:
            return rows + _observe_each(session, shared)
        except CloudError as error:
            notes.append(f"cannot see what stays: {error}")
            return rows
    network = session.plan.config.network.name
    others = resources_in_other_regions(session.context, network, {r.id for r in pod + shared})
    return _observe_each(session, [*pod, *shared, *others])


def _observe_each(session: Session, wanted: Sequence[Resource]) -> list[ResourcePreview]:
    rows = preview_resources(tuple(replace(r, depends_on=()) for r in wanted), session.context)
    return [replace(row, resource=resource) for row, resource in zip(rows, wanted, strict=True)]


def _will_be_deleted(row: ResourcePreview, everything: bool) -> bool:
    return (everything or row.resource.scope == "pod") and (
        isinstance(row.observed, Pending) or row.observed.is_managed
    )


def _with_dependencies(present: list[Resource]) -> list[Resource]:
    """Add the needs that are deleted too, so that dependents go first."""
    ids = {r.id for r in present}
    return [replace(r, depends_on=tuple(n for n in r.depends_on if n in ids)) for r in present]


def _refuse_if_used(session: Session, present: list[Resource]) -> None:
    used = dependents(session.context, session.plan.node, present)
    if used:
        raise ConfigError(
            f"nothing was deleted; still in use: {'; '.join(used)}. Delete that first, or run "
            "`slipway down` to delete only the pod"
        )


def _summary_lines(present: list[Resource], kept: list[ResourcePreview], undo: str, everything: bool) -> list[str]:
    """Describe what was deleted, what stays and why, and how to remove the rest."""
    lines = [] if present else ["nothing to delete: found no resources created by Slipway"]
    ours = [row.resource.title for row in kept if row.observed.is_managed]
    if ours and not everything:
        lines.append(f"kept for the next run: {', '.join(ours)}; `slipway down --all` deletes them too")
    if everything and present:
        lines.append(f"the APIs stay enabled, which costs nothing; to disable those that you do not need: {undo}")
        gone = {r.id for r in present}
        foreign = [
            row.resource for row in kept if not gone & set(row.resource.depends_on)
        ]  # else it was deleted with them
        if foreign:
            lines.append(f"not created by Slipway, left unchanged: {', '.join(r.title for r in foreign)}")
        lines += [
            f"data of runs stays in gs://{r.name}, under assets/, code/, pods/ and runs/"
            for r in foreign
            if isinstance(r, Bucket)
        ]
    return lines


def _other_buckets(session: Session) -> list[str]:
    """Return our buckets that stay: runs in other regions have their own, and their results may be needed."""
    listed = session.context.google.list_all("storage", "buckets.list", "items", project=session.context.project)
    ours = [b["name"] for b in listed if is_labelled(b)]
    return sorted(name for name in ours if name != session.plan.bucket)


def _affected_runs(session: Session, notes: list[str]) -> set[str]:
    """Return the runs that this would end: those on the pod, and the one with a controller, even without a pod yet."""
    found = set[str]()
    try:
        driver = pod_lease(session.plan, session.context).current_other()
        found |= set() if driver is None else {driver.record.run_id}
    except ForbiddenError as error:
        notes.append(f"cannot see whether another controller is at work: {error}")
    try:
        fleet = session.fleet()
        return found if fleet is None else found | active_runs(fleet.call_all(OBSERVE, {}))
    except SlipwayError as error:  # a pod must be deletable without a word from its workers
        notes.append(f"cannot ask the workers what they run: {error}")
        return found


def _confirm(command: Command, present: list[Resource], running: set[str]) -> bool:
    ends = [f"This ends {', '.join(sorted(running))}"] if running else []
    details = [*ends, "This deletes:", *(f"  {r.title}" for r in present)]
    return confirm("Continue?", yes=command.flags.yes, details=details)

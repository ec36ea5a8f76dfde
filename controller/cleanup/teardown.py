"""Delete the pod and, if asked, everything that pods share: what `slipway down` does, without its prompts."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from controller.agent.protocol import OBSERVE
from controller.cleanup.dependents import dependents, resources_in_other_regions
from controller.core.errors import CloudError, ConfigError, SlipwayError
from controller.core.events import Event
from controller.core.json_documents import UnreadableError
from controller.core.this_process import Clock, InterruptedSleepError
from controller.gcp.answers import is_labelled
from controller.gcp.google_errors import GoogleError
from controller.lease import Lease, pod_lease
from controller.plan.build import Plan, ResourcePreview, preview_resources
from controller.plan.samplers import is_sampler_pod, sampler_plans
from controller.reconcile import Absent, Pending, Resource, Unknown, among_themselves, destroy
from controller.records.ledger import record_cancellations
from controller.records.spending import close_billing, read_claim
from controller.records.unfinished import retry_deletions
from controller.resources.bastion_vm import Bastion
from controller.resources.bucket import Bucket
from controller.resources.machines import active_runs
from controller.resources.pod.node import Node
from controller.resources.pod.planes import plane_of, project_slices
from controller.resources.pod.provisioner import SliceStatus
from controller.resources.pod.slices import hidden_place
from controller.resources.vpc import ComputeResource
from controller.run.driven_here import end_starting, is_driven_here, run_lock
from controller.run.session import Session
from controller.sampler_release import end_pods
from controller.ssh.fleet import failures


@dataclass(frozen=True)
class Teardown:
    """What is there, and which part of it will be deleted."""

    session: Session
    everything: bool
    rows: list[ResourcePreview]
    """Resources that exist, the pod's first."""
    present: list[Resource]
    """Resources to delete."""
    running: set[str]
    """Runs that the deletion ends."""
    workers_answer: bool
    """Whether all workers could be asked what they run."""
    may_run: bool
    """Whether a run may be on the pod that neither its lease nor its workers could tell of."""
    notes: list[str] = field(default_factory=list)

    @property
    def kept(self) -> list[ResourcePreview]:
        return [row for row in self.rows if row.resource not in self.present and row.resource.scope == "shared"]

    def execute(self, listener: Callable[[Event], None]) -> None:
        """Delete what is to be deleted, dependents first; `listener` receives the progress.

        Raises LeaseLostError if another controller has taken the pod over in the meantime.
        """
        lease = pod_lease(self.session.plan, self.session.context)
        try:
            with lease.released_on_exit():
                self.session.context.events.add_listener(listener)
                self._delete(lease)
        except InterruptedSleepError:
            lease.raise_if_lost()  # the controller that fences us wakes us up
            raise

    def left(self) -> list[Resource]:
        """Look once more: return what was deleted and is there, since another controller has made it meanwhile."""
        lasting = [one for one in self.present if one.scope == "pod" or isinstance(one, Bucket | ComputeResource)]
        try:
            rows = _observe_each(self.session, lasting)
        except CloudError:
            return []  # each was seen to be gone when it was deleted
        return [row.resource for row in rows if _is_there(row) and not isinstance(row.observed, Pending)]

    def _delete(self, lease: Lease) -> None:
        context, node = self.session.context, self.session.plan.node
        run_id = self.session.plan.run_id
        if end_starting(context, lease, run_lock(context, run_id), run_id, "deleted"):
            self.running.add(run_id)
        problem = self._take_pod(lease) if self._is_used(lease) else ""
        # before their pods are deleted, or the controller of the samplers would take that for a preemption
        apart = replace(context, clock=Clock())  # the loss of a lease of theirs is not to interrupt the rest
        self.notes.extend(end_pods(self.session.plan, apart, "deleted by down", only_own=False))
        self._look_again()
        problem = problem or self._end_records()
        if problem and (self.present or self.running):
            self.notes.append(f"the end of the runs and of the pod's time is not on record: {problem}")
        for message in dict.fromkeys(self.notes):
            context.events.note(node.id, message)
        if lease.held:
            with suppress(GoogleError):
                lease.ensure()  # another controller may have taken the pod over while this machine slept
        buckets = [resource for resource in self.present if isinstance(resource, Bucket)]
        destroy(among_themselves(resource for resource in self.present if resource not in buckets), context)
        lease.release("deleted by down", 0)  # it is in the bucket that goes last
        destroy(among_themselves(buckets), context)

    def _is_used(self, lease: Lease) -> bool:
        """Return whether anything of the pod is there, if only a bastion or a controller that is yet to create it."""
        if self.running or any(resource.scope == "pod" for resource in self.present):
            return True
        with suppress(GoogleError):
            return lease.current_other() is not None
        return False

    def _take_pod(self, lease: Lease) -> str:
        """End the runs and acquire the lease, so that no controller creates the pod again; return what went wrong."""
        events, run_id = self.session.context.events, self.session.plan.run_id
        try:
            if (other := lease.current_other()) is not None:
                self.running.add(other.record.run_id)  # it may have begun since we looked
            problem = self._cancel()
            lease.take_over("deleted", lambda message: events.note(run_id, message))
        except GoogleError as error:  # a pod must be deletable without its bucket
            return str(error)
        return problem

    def _cancel(self) -> str:
        """Record that the runs end; return what went wrong."""
        problems = record_cancellations(self.session.context, self.session.plan.bucket, self.running)
        return next(iter(problems), "")

    def _look_again(self) -> None:
        """Observe what is there now that no other controller changes it: much may have happened since we looked.

        A network that a starting controller has filled meanwhile could not be deleted without what is in it.
        """
        try:
            if self.everything:
                rows = _observe(self.session, self.everything, self.notes)
            else:
                rows = _observe_each(self.session, _of_pod(self.session.plan))
        except CloudError as error:
            self.notes.append(f"cannot see whether more was created in the meantime: {error}")
            return
        now = {row.resource.id: row for row in rows if _is_there(row)}
        known = {row.resource.id for row in self.rows}
        self.rows[:] = [_newer(row, now.get(row.resource.id)) for row in self.rows]
        self.rows.extend(row for row_id, row in now.items() if row_id not in known)
        to_delete = {resource.id for resource in self.present}
        new = [row for row_id, row in now.items() if row_id not in to_delete]
        self.present.extend(row.resource for row in new if _will_be_deleted(row, self.everything))

    def _end_records(self) -> str:
        """Record that the pod's time and the runs on it end; return what went wrong."""
        problem = ""
        if any(isinstance(resource, Node) for resource in self.present):
            if self.workers_answer:
                self.running.update(_runs_on_workers(self.session, self.notes)[0])
            problem = self._cancel()  # again: one may have made another attempt before it released the lease
        try:
            context, plan = self.session.context, self.session.plan
            seen = {row.resource.id: row.observed for row in self.rows}
            for resource in self.present:
                if isinstance(resource, Node):
                    observed = seen[resource.id]
                    node = observed if isinstance(observed, Node) else resource.find(context)  # it may be under repair
                    if node is not None:
                        close_billing(context, plan.bucket, plan.config, node, "deleted by down")
        except SlipwayError as error:
            return str(error)
        return problem


def plan_teardown(session: Session, everything: bool) -> Teardown:
    """Look at what is there, and decide what to delete.

    Raises ConfigError if something else still uses a shared resource.
    """
    notes = retry_deletions(session.context)
    rows = [row for row in _observe(session, everything, notes) if _is_there(row)]
    present = [row.resource for row in rows if _will_be_deleted(row, everything)]
    driven, lease_is_known = _driven_run(session, notes)
    on_pod, workers_answer = _runs_on_workers(session, notes)
    if everything:
        if used := dependents(session.context, session.plan.node, present):
            raise ConfigError(
                f"nothing was deleted; still in use: {'; '.join(used)}. Delete that first, or run "
                "`slipway down` to delete only the pod"
            )
        if unlisted := sorted(session.context.google.unlisted):  # its VMs may be in the network, or have the account
            raise ConfigError(
                f"nothing was deleted; Google did not list everything ({', '.join(unlisted)}), and what is there may "
                "still use it. Run this again later, or `slipway down` to delete only the pod"
            )
    may_run = not lease_is_known and not workers_answer
    return Teardown(session, everything, rows, present, driven | on_pod, workers_answer, may_run, notes)


def other_buckets(session: Session) -> list[str]:
    """Return our buckets that stay: runs in other regions have their own, and their results may be needed."""
    listed = session.context.google.list_all("storage", "buckets.list", "items", project=session.context.project)
    ours = [b["name"] for b in listed if is_labelled(b)]
    return sorted(name for name in ours if name != session.plan.bucket)


def _observe(session: Session, everything: bool, notes: list[str]) -> list[ResourcePreview]:
    """Return the pod and shared resources as they are now, each observed by itself."""
    pod = [*_of_pod(session.plan), *_samplers_of_earlier_configs(session, notes)]
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


def _of_pod(plan: Plan) -> list[Resource]:
    """Return the node, its data disk, which is deleted after it, its bastion, and pods of samplers."""
    node, bastions = plan.node, [r for r in plan.resources if isinstance(r, Bastion)]
    others = [*bastions, *(one.node for one in sampler_plans(plan, Path.cwd()))]
    if (disk := node.disk) is None:
        return [node, *others]
    return [replace(node, depends_on=(*node.depends_on, disk.id)), disk, *others]


def _samplers_of_earlier_configs(session: Session, notes: list[str]) -> list[Node]:
    """Return this pod's pods of samplers that the config does not name: an earlier one had more, or other zones."""
    context, node = session.context, session.plan.node
    named = [one.node for one in sampler_plans(session.plan, Path.cwd())]
    try:
        others = [
            status
            for status in project_slices(context)
            if status.is_labelled and not any(sampler.may_be(status) for sampler in named)
        ]
        found = [status for status in others if _samples_for(session, status)]
    except (GoogleError, UnreadableError) as error:  # the pod must be deletable without them
        notes.append(f"cannot see whether pods of samplers of an earlier config are left: {error}")
        return []
    return [
        replace(node, name=status.name, spec=status.spec, specs={}, places=(status.place,), depends_on=())
        for status in found
    ]


def _samples_for(session: Session, status: SliceStatus) -> bool:
    """Return whether a slice is one of samplers of the session's pod, by its name and by the run that uses it."""
    if not is_sampler_pod(status.name, session.plan.node.name):
        return False
    claim = read_claim(session.context.google, session.plan.bucket, status.name, status.uid) if status.uid else {}
    return not claim or is_sampler_pod(claim["latest"])


def _observe_each(session: Session, wanted: Sequence[Resource]) -> list[ResourcePreview]:
    rows = preview_resources(tuple(replace(r, depends_on=()) for r in wanted), session.context)
    return [replace(row, resource=resource) for row, resource in zip(rows, wanted, strict=True)]


def _is_there(row: ResourcePreview) -> bool:
    return not isinstance(row.observed, Absent | Unknown)


def _newer(row: ResourcePreview, later: ResourcePreview | None) -> ResourcePreview:
    """Return the later observation, unless it says less of a node: one that is being deleted is only pending."""
    return row if later is None or (isinstance(row.observed, Node) and not isinstance(later.observed, Node)) else later


def _will_be_deleted(row: ResourcePreview, everything: bool) -> bool:
    return (everything or row.resource.scope == "pod") and (
        isinstance(row.observed, Pending) or row.observed.is_managed
    )


def _driven_run(session: Session, notes: list[str]) -> tuple[set[str], bool]:
    """Return the run that has another controller, even without a lease yet, and whether the lease could be read."""
    run_id = session.plan.run_id
    starting = {run_id} if is_driven_here(run_lock(session.context, run_id)) else set[str]()
    try:
        driver = pod_lease(session.plan, session.context).current_other()
    except GoogleError as error:
        notes.append(f"cannot see whether another controller is at work: {error}")
        return starting, False
    return (starting if driver is None else {driver.record.run_id}), True


def _runs_on_workers(session: Session, notes: list[str]) -> tuple[set[str], bool]:
    """Return the runs on the pod, and whether all workers could be asked; without a pod, there are none."""
    try:
        fleet = session.fleet()
        answers = [] if fleet is None else fleet.call_all(OBSERVE, {})
    except SlipwayError as error:  # a pod must be deletable without a word from its workers
        notes.append(f"cannot ask the workers what they run: {error}")
        return set(), False
    return active_runs(answers), not failures(answers)


def unreadable_places(session: Session) -> list[str]:
    """Return where this project could not look for the pod, in words."""
    places = session.plan.node.places
    where = dict.fromkeys(hidden_place(place.zone, plane_of(place.provisioner)) for place in places)
    return [place for place in where if place in session.context.permission_denied]

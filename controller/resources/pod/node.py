"""The pod: one slice with all of its VMs, in the first of its places with capacity.

`search.py` and the provisioners create a slice; this module decides what must be done.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.core.errors import CloudError
from controller.core.finding import Finding, Rule
from controller.core.text import plural
from controller.gcp.answers import OPERATION_SECONDS, TAG
from controller.gcp.google_errors import GoogleError
from controller.reconcile import Absent, Change, Diff, ObservedResources, Pending, Resource, Scope, difference
from controller.resources.pod.capacity_log import record_echo, recorded_echo
from controller.resources.pod.plane import Plane
from controller.resources.pod.planes import plane_of, provisioners_of, waits_in_queue
from controller.resources.pod.provisioner import (
    NOT_OBSERVED,
    WAITING_STATES,
    DataDisk,
    Place,
    PodStatus,
    ProvisionerName,
    SliceSpec,
    SliceStatus,
    data_disk_name,
    state_text,
)
from controller.resources.pod.refusals import adopted_differs, classify, nothing_to_adopt, wrong_worker_count
from controller.resources.pod.search import CapacitySearch
from controller.resources.pod.slices import Slices, differs_where_known, hidden_place
from controller.ssh.fleet import Fleet, SshTarget
from controller.ssh.login import WorkerVms

ECHOED_FIELDS = frozenset({"network", "runtime_version", "subnetwork"})
"""Fields that an answer of the API may leave out; they are as requested then."""
ADOPTED_FIELDS = frozenset({"accelerator_type", "state", "workers"})
"""Fields in which an adopted pod must agree with the config."""
ADOPTED_EXISTS = Rule("adopted_exists", ("error",), ("tpu.adopt",), "tpu.adopt=true requires an existing pod.")
ADOPTED_FITS = Rule(
    "adopted_fits", ("error",), ("tpu.adopt",),
    "An adopted pod is never changed, so it must match the config, and its workers must be able to use the bucket.",
)  # fmt: skip
FOREIGN_POD = Rule(
    "foreign_pod", ("warning",), ("tpu.name",), "Slipway uses a pod that it did not create, but never deletes it."
)
ENDPOINTS = Rule(
    "endpoints", ("error",), ("tpu.accelerator_type",),
    "A pod whose number of workers differs from conf/tpu_types.yaml is incomplete, or the table is wrong.",
)  # fmt: skip
UNHEALTHY = Rule(
    "unhealthy", ("warning",), ("tpu.name",), "Programs may fail to start on a pod that Google reports as unhealthy."
)
_DELETION_PENDING_HINT = "Google has not finished deleting it: run this again later, or set tpu.name to another name"


@dataclass(frozen=True, kw_only=True)
class Node(Resource):
    """A slice that is READY, in any of its places. A preempted one, or one with another spec, is replaced.

    Attributes:
        spec: the slice that the first place is asked for.
        specs: by all provisioners that may have made the pod; without them, `spec` holds for all places.
        places: where to ask, in order.
        create_seconds: how long one creation may take.
        adopt: use an existing pod; it is never created, changed or deleted.
        status: what was observed.
        surplus: what a search on several planes has left beside a pod that is READY.
        echo: settings that Google shows otherwise than they were requested, as it shows them.
    """

    kind: ClassVar[str] = "node"
    scope: ClassVar[Scope] = "pod"
    spec: SliceSpec
    specs: Mapping[ProvisionerName, SliceSpec] = field(default_factory=dict[ProvisionerName, SliceSpec], compare=False)
    places: tuple[Place, ...] = field(compare=False)
    max_create_attempts: int = field(compare=False)
    create_seconds: float = field(compare=False)
    adopt: bool = field(default=False, compare=False)
    status: SliceStatus = field(default=NOT_OBSERVED, compare=False)
    surplus: tuple[SliceStatus, ...] = field(default=(), compare=False)
    echo: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)

    @property
    def title(self) -> str:
        return f"TPU {self.spec.accelerator_type} ({plural(self.spec.workers, 'worker')}) {self.name}"

    @property
    def timeout(self) -> float:
        if len(self.places) == 1 and waits_in_queue(self.places[0]):
            return self.create_seconds + (self.spec.valid_until_seconds or float("inf"))
        return 2 * self.create_seconds

    @property
    def is_managed(self) -> bool:
        return self._is_managed(self.status)

    @property
    def is_ready(self) -> bool:
        return self.status.is_ready

    @property
    def place(self) -> Place:
        """The place of the pod; before it is observed, the first place to try."""
        return self.places[0] if self.status is NOT_OBSERVED else self.status.place

    def spec_fields(self, place: Place | None = None) -> dict[str, Any]:
        place = place or self.places[0]
        fields = {**self.spec_in(place).at(place), "state": "READY"}
        return {name: value for name, value in fields.items() if not self.adopt or name in ADOPTED_FIELDS}

    def spec_in(self, place: Place) -> SliceSpec:
        """Return the slice to ask for in a place."""
        return self.specs.get(place.provisioner, self.spec)

    def diff(self, current: Absent | Resource) -> Diff:
        if not isinstance(current, Node):
            return super().diff(Absent())
        status = current.status
        observed = {**status.spec.at(status.place), "state": status.state}
        wanted = self.spec_fields(self._place_like(status))
        observed |= dict.fromkeys(wanted.keys() - observed.keys(), "")  # nothing is known of a group without VMs
        observed |= {name: wanted[name] for name in ECHOED_FIELDS & wanted.keys() if not observed[name]}
        observed |= {name: wanted[name] for name in current.echo if current.echo[name] == observed.get(name)}
        if not status.is_ready:
            observed["workers"] = self.spec.workers  # its endpoints are not complete
        diff = difference(wanted, observed, immutable=frozenset(observed))
        if diff or not current.surplus:
            return diff
        beside = ", ".join(f"{other.state.lower()} in {other.place}" for other in current.surplus)
        return Diff("update", (Change("surplus", beside, "given back"),))

    def findings(self, current: Any) -> Iterator[Finding]:
        if isinstance(current, Absent) and self.adopt:
            yield ADOPTED_EXISTS.finding(nothing_to_adopt(self.name, self.places))
        if not isinstance(current, Node):
            return
        if self.adopt and (diff := self.diff(current)):
            yield ADOPTED_FITS.finding(adopted_differs(self.name, diff))
        elif not current.is_managed and not self.adopt:
            message = f"{self.name} was not created by Slipway: it is used but never deleted, as with tpu.adopt=true"
            yield FOREIGN_POD.finding(message)
        if current.status.obstacle and not current.is_managed:
            yield ADOPTED_FITS.finding(f"pod {self.name}: {current.status.obstacle}")
        if current.is_ready and current.status.spec.workers != self.spec.workers:
            yield ENDPOINTS.finding(wrong_worker_count(self.spec, current.status))
        if (health := current.status.health).startswith("UNHEALTHY"):
            message = (
                f"Google reports the pod as {health.lower()}; if programs fail to start, run `slipway down`, then `up`"
            )
            yield UNHEALTHY.finding(message)

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Pending | Self:
        found = self._found(context)
        if not found:
            return Absent()
        status = found[0]
        mine = self.adopt or self._is_managed(status)
        if status.pending and mine and not self._is_to_be_searched(context, found):
            if status.state == "DELETING":
                return Pending("deleting", OPERATION_SECONDS, _DELETION_PENDING_HINT)
            return Pending(_waiting_words(status))
        seen = replace(self, status=status, surplus=tuple(found[1:]) if status.is_ready else ())
        differs = status.is_ready and self._is_managed(status) and self.diff(seen).action == "replace"
        return replace(seen, echo=recorded_echo(context, self.name, status)) if differs else seen

    def _found(self, context: Context) -> list[SliceStatus]:
        """Return the slice that is the pod; on several planes, after it what else of ours is billed or may be."""
        return self._slices.pod_and_others(context, self._is_managed)

    def find(self, context: Context, uids: Collection[str] = (), *, surely: bool = False) -> Self | None:
        """Return the pod in whatever state; preferably one with one of the `uids`. `surely`: see `Slices.find`."""
        status = self._slices.find(context, uids, surely=surely)
        return None if status is None else replace(self, status=status)

    def is_visible_in(self, context: Context, zone: str) -> bool:
        """Return whether a zone is one of the pod's in which the caller may look for it; known after a look."""
        there = {hidden_place(zone, plane_of(place.provisioner)) for place in self.places if place.zone == zone}
        return bool(there) and there.isdisjoint(context.refused_since)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        """Search for capacity, after deleting what exists if it is ours; or start a stopped pod.

        Raises CloudError if what exists is not ours, or Google refused.
        """
        found = self._found(context)
        status = found[0] if found else None
        if self.adopt:
            raise CloudError(
                nothing_to_adopt(self.name, self.places) if status is None else adopted_differs(self.name, diff)
            )
        if status is None:
            self._create(context)
            return
        if not self._is_managed(status):
            raise CloudError(
                f"node {self.name} in {status.place.zone} was not created by Slipway and differs ({diff}). Slipway "
                "does not change it: set tpu.name to another name"
            )
        if status.is_ready and len(found) > 1:
            self._slices.give_back(context, found[1:])
            return
        if self._slices.has_several_planes and self._is_to_be_searched(context, found):
            kept = [other for other in found if self._may_become(other)]
            for other in (other for other in found if other.pending and other not in kept):
                context.events.note(self.id, f"deleting the request in {other.place}: it was made with other settings")
            self._slices.delete(context, lambda other: self._is_managed(other) and not self._may_become(other))
            self._create(context, found=kept)
            return
        if status.is_ready and {change.field for change in diff.changes} == {"workers"}:
            raise CloudError(f"{self.title}: {wrong_worker_count(self.spec, status)}")
        if status.state == "STOPPED" and self._start(context, status):
            return
        if not status.is_ready:
            context.events.note(self.id, f"the node is {status.state.lower()}: deleting and recreating it")
        self._slices.delete(context, self._is_managed)
        self._create(context, after=self._place_like(status) if status.state in WAITING_STATES else None)

    def _create(self, context: Context, after: Place | None = None, found: Sequence[SliceStatus] = ()) -> None:
        """Search for capacity. How Google shows it otherwise than it was requested goes on record.

        What was `found` is one of an earlier run.
        """
        self._search(context).run(after, found)
        made = self.find(context)
        if made is None or not made.is_ready or not self._is_managed(made.status):
            return
        if any((one.place.zone, one.created) == (made.place.zone, made.status.created) for one in found):
            return
        diff = self.diff(made)
        if shown := {change.field: change.old for change in diff.changes if change.field != "workers"}:
            record_echo(context, self.name, made.status.uid, shown)
            words = f"Google shows the pod with other settings than requested ({diff}), and it is used so"
            context.events.note(self.id, f"{words}: please report this; `slipway down` deletes it")

    def destroy(self, context: Context) -> None:
        if self.adopt:
            return
        self._slices.delete(context, self._is_managed, surely=True)
        if self.disk is not None:
            self.disk.destroy(context)

    @property
    def disk(self) -> DataDisk | None:
        """The data disk, which may exist without the node."""
        if self.adopt or not self.spec.data_disk_gb:
            return None
        return DataDisk(name=data_disk_name(self.name), zones=self._zones)

    def pod_seen(self, context: Context, since: float = 0.0) -> PodStatus:
        """Return what Google reports about this incarnation of the pod; GoogleError where it refuses to say.

        Args:
            context: the run's context.
            since: omits symptoms that appeared earlier; seconds since the epoch.
        """
        status = self._slices.find(context, surely=True)
        return PodStatus("ABSENT") if status is None else status.pod_seen(self.status.uid, since)

    def delete_all(self, context: Context, *, elsewhere: bool = False) -> None:
        """Delete all slices of the pod, whatever their state.

        With `elsewhere`, create the pod again, starting with the next place.
        """
        status = self._slices.find(context)
        self._slices.delete(context, self._is_managed)
        if elsewhere and status is not None:
            self._search(context).run(after=self._place_like(status))

    @property
    def plane(self) -> Plane:
        """The plane of the pod; before it is observed, that of the first place to try."""
        return plane_of(self.place.provisioner)

    def vms(self, context: Context) -> WorkerVms:
        """Return the VMs of an observed node."""
        return self.plane.vms(context, self.name, self.status)

    def ssh_target(self, context: Context) -> SshTarget:
        """Return what SSH needs to know of an observed node."""
        status = self.status
        return SshTarget(
            name=self.name,
            vms=self.vms(context),
            uid=status.uid,
            zone=status.place.zone,
            network=status.spec.network,
            tags=status.tags or ((TAG,) if status.is_labelled else ()),
            addresses=tuple((endpoint.internal, endpoint.external) for endpoint in status.endpoints),
        )

    def fleet(self, context: Context) -> Fleet:
        """Return the SSH connections to the workers of an observed node."""
        return context.fleets.of(self.ssh_target(context))

    def accepts_our_key(self, context: Context) -> bool:
        return context.ssh_login.is_authorized(self.vms(context), self.status.ssh_keys)

    def may_be(self, status: SliceStatus) -> bool:
        """Return whether a slice of the project has the pod's name, in one of its zones."""
        return status.name == self.name and status.place.zone in self._zones

    def stop(self, context: Context) -> None:
        """Stop an observed node; see `cannot_stop` first."""
        self.plane.stop(context, self.name, self.place.zone, self.create_seconds)

    @property
    def cannot_stop(self) -> str:
        """Why an observed node cannot be stopped, or ''."""
        return self.plane.cannot_stop(self.name, self.spec, self.place)

    @property
    def _zones(self) -> tuple[str, ...]:
        """Return the zones where it may be; an observed pod has one."""
        return (self.place.zone,) if self.status.uid else tuple(dict.fromkeys(place.zone for place in self.places))

    @property
    def _slices(self) -> Slices:
        names = {place.provisioner for place in (*self.places, self.place) if place.provisioner} | self.specs.keys()
        return Slices(self.name, self._zones, provisioners_of(names, self.create_seconds))

    def _search(self, context: Context) -> CapacitySearch:
        return CapacitySearch(
            context=context,
            subject=self.id,
            title=self.title,
            name=self.name,
            specs={place.provisioner: self.spec_in(place) for place in self.places},
            places=self.places,
            provisioners=self._slices.provisioners,
            max_attempts=self.max_create_attempts,
            create_seconds=self.create_seconds,
        )

    def _start(self, context: Context, status: SliceStatus) -> bool:
        """Start a stopped node instead of creating another; False if Google cannot, or has no capacity for it."""
        if replace(self, status=status).cannot_stop:
            return False
        zone = status.place.zone
        context.events.note(self.id, "the node is stopped; starting it")
        try:
            plane_of(status.place.provisioner).start(context, self.name, zone, self.create_seconds)
        except GoogleError as error:
            if classify(error.reason, error.message) != "stock_out":
                raise
            context.events.note(self.id, f"no capacity to start it in {zone}: {error.message}")
            return False
        return True

    def _is_to_be_searched(self, context: Context, found: Sequence[SliceStatus]) -> bool:
        """Return whether a request is not just waited for: it has waited too long, or other planes can be asked too."""
        status = found[0]
        if self._slices.has_several_planes and not self.adopt:
            return not status.is_ready and any(other.state in WAITING_STATES for other in found)
        late = context.clock.now() - status.created > self.create_seconds
        return len(self.places) > 1 and status.state in WAITING_STATES and late

    def _may_become(self, status: SliceStatus) -> bool:
        """Return whether what exists may still become the pod: a request whose settings, where known, do not differ."""
        if status.state not in WAITING_STATES:
            return status.pending  # Google deletes no request that it is serving; once READY it is replaced
        place = self._place_like(status)
        return not differs_where_known(status, self.spec_in(place).at(place))

    def _place_like(self, status: SliceStatus) -> Place:
        """Return the configured place that is most like the one where a slice is."""
        plane, there = plane_of(status.place.provisioner), status.place

        def likeness(place: Place) -> tuple[bool, ...]:
            same_plane = plane_of(place.provisioner) == plane
            return same_plane, place.zone == there.zone, place.capacity == there.capacity

        return max(self.places, key=likeness)  # the first of those that are equally like

    def _is_managed(self, status: SliceStatus) -> bool:
        return not self.adopt and status.is_labelled


def describe(observed: Absent | Pending | Node) -> str:
    """Return the state of an observed pod in lower-case words."""
    match observed:
        case Absent():
            return "absent"
        case Pending():
            return observed.why
        case Node():
            return _waiting_words(observed.status)


def _waiting_words(status: SliceStatus) -> str:
    """Return a state in lower-case words; what waits in a queue, with its zone."""
    state = state_text(status.state)
    waits = status.pending and status.state != "DELETING" and waits_in_queue(status.place)
    return f"{state} in {status.place.zone}" if waits else state

"""Every slice that has the pod's name, in all its zones and on all its planes.

There may be several: a search that was killed, and a request that was abandoned, may have left more than one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

from controller.context import Context
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.google_errors import ForbiddenError, GoogleError, ServiceDisabledError
from controller.resources.deletions import DeletionPendingError, deletions_here
from controller.resources.pod.capacity_log import SURPLUS, record_end
from controller.resources.pod.plane import Plane
from controller.resources.pod.planes import plane_of
from controller.resources.pod.provisioner import Provisioner, ProvisionerName, SliceStatus, pod_object, state_text

REQUESTED_FIELDS = frozenset(
    {"accelerator_type", "capacity", "machine_type", "network", "runtime_version", "subnetwork"}
)
"""Fields that show of a request that waits what it will become, where they are not empty."""


@dataclass(frozen=True)
class Slices:
    """Every slice of one name in some zones."""

    name: str
    zones: Sequence[str]
    provisioners: Mapping[ProvisionerName, Provisioner]

    def find(self, context: Context, uids: Collection[str] = (), *, surely: bool = False) -> SliceStatus | None:
        """Return a READY slice if there is one, else one that is coming up, else a dead one.

        A slice with one of the `uids` comes first in any state. Among READY ones, a slice whose deletion is on record
        comes last: the search went on without it. None is sure only with `surely`, which may raise as `_refuse_doubt`.
        """
        found = next(iter(self.ranked(context, uids, all_places=False)), None)
        if found is None and surely:
            self._refuse_doubt(context)
        return found

    def ranked(self, context: Context, uids: Collection[str] = (), *, all_places: bool = True) -> list[SliceStatus]:
        """Return the slices in the order of `find`; without `all_places` only up to the first that nothing precedes."""

        def rank(status: SliceStatus) -> tuple[bool, ...]:
            is_wanted = not uids or status.uid in uids
            return not is_wanted, not status.is_ready, self.is_abandoned(context, status), not status.pending

        found: list[SliceStatus] = []
        for zone, ways in self._where:
            status = next((status for _, status in self._slices_at(context, zone, ways)), None)
            if status is not None:
                found.append(status)
                if not all_places and not any(rank(status)[:3]):
                    break
        found.sort(key=rank)
        if found and found[0].is_under_repair:
            context.fleets.expect_new_host_keys(found[0].uid)
        return found

    def is_abandoned(self, context: Context, status: SliceStatus) -> bool:
        """Return whether the deletion of a slice is on record on this machine."""
        here = (one for one in deletions_here(context, []) if one.pod == self.name)
        return (status.place.zone, status.created) in {(one.zone, one.created_seconds) for one in here}

    def delete(
        self, context: Context, condition: Callable[[SliceStatus], bool], why: str = "deleted", *, surely: bool = False
    ) -> None:
        """Delete every slice that meets the condition; their data disks stay. `why` is for the record of capacity.

        A slice that is given back is on record before, too: a controller that is killed meanwhile leaves its cost. With
        `surely`, where there is none, this raises as `_refuse_doubt`.
        """
        deleted = False
        for zone, ways in self._where:
            for provisioner, status in self._slices_at(context, zone, ways):
                if condition(status):
                    if why == SURPLUS:
                        record_end(context, self.name, status, why)
                    provisioner.delete(context, self.name, zone, is_hurried=why == SURPLUS)
                    record_end(context, self.name, status, why)
                    deleted = True
        if surely and not deleted:
            self._refuse_doubt(context)

    def pod_and_others(self, context: Context, is_managed: Callable[[SliceStatus], bool]) -> list[SliceStatus]:
        """Return the slice that is the pod; on several planes, after it what else a killed search may have left.

        A slice that a run has had is the pod, and never one of the others; nor is one whose deletion is on record.
        """
        found = self.ranked(context, all_places=self.has_several_planes)
        if not self.has_several_planes or not found or not is_managed(found[0]):
            return found[:1]
        there = [status for status in found if status.is_ready or (status.pending and status.uid)]
        used = [status for status in there if len(there) > 1 and self._has_had_run(context, status)]
        if used and not any(status.is_ready for status in used):
            return used[:1]  # Google is repairing it; nothing is asked for or given back until it is READY
        best = next(iter(used), found[0])
        others = [
            status for status in found
            if status not in (best, *used) and (status.is_ready or status.pending) and status.state != "DELETING"
            and is_managed(status) and not self.is_abandoned(context, status)
        ]  # fmt: skip
        return [best, *others]

    def give_back(self, context: Context, surplus: Sequence[SliceStatus]) -> None:
        """Delete what a search that was killed has left beside the pod."""
        where = {(other.place.zone, other.place.provisioner) for other in surplus}
        for other in surplus:
            what = f"what is {state_text(other.state)} in {other.place}"
            context.events.note(f"node/{self.name}", f"giving back {what}: the pod is there")
        try:
            self.delete(context, lambda other: (other.place.zone, other.place.provisioner) in where, why=SURPLUS)
        except DeletionPendingError as error:  # it is on record, and so none of the pod's from now on
            context.events.note(f"node/{self.name}", str(error))

    def _has_had_run(self, context: Context, status: SliceStatus) -> bool:
        """Return whether a run has claimed a slice."""
        where = {"bucket": context.bucket, "object": pod_object("claims", self.name, status.uid)}
        return bool(context.bucket) and context.google.find("storage", "objects.get", **where) is not None

    @property
    def has_several_planes(self) -> bool:
        return len(self._ways_by_plane) > 1

    @property
    def _where(self) -> list[tuple[str, list[ProvisionerName]]]:
        """Return each zone with each plane."""
        return list(product(self.zones, self._ways_by_plane))

    def unknown(self, context: Context) -> list[str]:
        """Return the places where Google refused to say at the last look whether the pod is there.

        A refusal that lasts longer than new rights need is no longer one: the place is closed to the caller.
        """
        places = [hidden_place(zone, plane_of(ways[0])) for zone, ways in self._where]
        begin = context.clock.now() - PROPAGATION_SECONDS
        return [place for place in places if context.refused_since.get(place, begin) > begin]

    def _refuse_doubt(self, context: Context) -> None:
        """Raise a transient GoogleError if a place is unknown."""
        if unknown := self.unknown(context):
            words = f"Google does not show {' and '.join(unknown)} now"
            raise GoogleError(f"look for {self.name}", 503, "REFUSED", words)

    @property
    def _ways_by_plane(self) -> list[list[ProvisionerName]]:
        """Return the names of the provisioners, grouped by plane."""
        return [list(names) for _, names in groupby(self.provisioners, plane_of)]

    def _slices_at(
        self, context: Context, zone: str, ways: Sequence[ProvisionerName]
    ) -> Iterator[tuple[Provisioner, SliceStatus]]:
        """Yield what one plane has in a zone; nothing where Google refuses to say so, which `unknown` tells then."""
        place, is_refused = hidden_place(zone, plane_of(ways[0])), False
        for provisioner in (self.provisioners[name] for name in ways):
            try:
                status = provisioner.observe(context, self.name, zone)
            except (ForbiddenError, ServiceDisabledError) as error:
                if len(self._where) == 1:
                    raise
                is_refused = True
                context.refused_since.setdefault(place, context.clock.now())
                if isinstance(error, ForbiddenError) and place not in context.permission_denied:
                    context.permission_denied.add(place)  # closed to the project, or to the caller
                    context.events.note(f"node/{self.name}", f"cannot look for {place}: {error.message}")
                continue
            if status is not None:
                context.refused_since.pop(place, None)
                yield provisioner, status
        if not is_refused:
            context.permission_denied.discard(place)
            context.refused_since.pop(place, None)


def differs_where_known(status: SliceStatus, wanted: Mapping[str, Any]) -> bool:
    """Return whether a request that waits is one for another slice than the wanted one."""
    seen = status.spec.at(status.place)
    differing = {name for name in REQUESTED_FIELDS if seen.get(name) and seen[name] != wanted.get(name)}
    if seen["workers"] not in (0, wanted["workers"]):  # of a group whose VMs are not complete yet
        differing -= {"accelerator_type"}
    return bool(differing)


def hidden_place(zone: str, plane: Plane) -> str:
    """Return the entry of `Context.permission_denied` for pods of a plane in a zone, which the caller may not see."""
    return f"TPUs of {plane.title} in {zone}"

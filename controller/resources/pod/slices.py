"""Every slice that has the pod's name: an abandoned request may yet become a second one, in another zone."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from controller.context import Context
from controller.gcp.errors import ForbiddenError, ServiceDisabledError
from controller.resources.pod.capacity_log import record_end
from controller.resources.pod.pending_deletion import deletions_here
from controller.resources.pod.plane import Plane
from controller.resources.pod.planes import plane_of
from controller.resources.pod.provisioner import Provisioner, ProvisionerName, SliceStatus


@dataclass(frozen=True)
class Slices:
    """Every slice of one name in some zones."""

    name: str
    zones: Sequence[str]
    provisioners: Mapping[ProvisionerName, Provisioner]

    def find(self, context: Context, uids: Collection[str] = ()) -> SliceStatus | None:
        """Return a READY slice if there is one, else one that is coming up, else a dead one.

        A slice with one of the `uids` comes first in any state. Among READY ones, a slice whose deletion is on record
        comes last: the search went on without it.
        """
        abandoned = {(one.zone, one.created_seconds) for one in deletions_here(context, []) if one.pod == self.name}

        def rank(status: SliceStatus) -> tuple[bool, ...]:
            is_abandoned = (status.place.zone, status.created) in abandoned
            return bool(uids) and status.uid not in uids, not status.is_ready, is_abandoned, not status.pending

        found: list[SliceStatus] = []
        for zone, ways in product(self.zones, self._ways_by_plane):
            status = next((status for _, status in self._spec_at(context, zone, ways)), None)
            if status is not None:
                found.append(status)
                if not any(rank(status)[:3]):
                    break
        best = min(found, key=rank, default=None)
        if best is not None and best.is_under_repair:
            context.fleets.expect_new_host_keys(best.uid)
        return best

    def delete(self, context: Context, condition: Callable[[SliceStatus], bool]) -> None:
        """Delete every slice that meets the condition; their data disks stay."""
        for zone, ways in product(self.zones, self._ways_by_plane):
            for provisioner, status in self._spec_at(context, zone, ways):
                if condition(status):
                    provisioner.delete(context, self.name, zone)
                    record_end(context, self.name, status)

    @property
    def _ways_by_plane(self) -> list[list[ProvisionerName]]:
        """Return the names of the provisioners, grouped by plane."""
        return [list(names) for _, names in groupby(self.provisioners, plane_of)]

    def _spec_at(
        self, context: Context, zone: str, ways: Sequence[ProvisionerName]
    ) -> Iterator[tuple[Provisioner, SliceStatus]]:
        """Yield what one plane has in a zone; nothing where it cannot be asked and there are other places."""
        sole = len(self.zones) * len(self._ways_by_plane) == 1
        for provisioner in (self.provisioners[name] for name in ways):
            try:
                status = provisioner.observe(context, self.name, zone)
            except ServiceDisabledError:
                if sole:
                    raise
                continue
            except ForbiddenError as error:
                if sole:
                    raise
                place = hidden_place(zone, plane_of(ways[0]))
                if place not in context.permission_denied:  # closed to the project, or to the caller
                    context.permission_denied.add(place)
                    context.events.note(f"node/{self.name}", f"cannot look for {place}: {error.message}")
                continue
            if status is not None:
                yield provisioner, status


def hidden_place(zone: str, plane: Plane) -> str:
    """Return the entry of `Context.permission_denied` for pods of a plane in a zone, which the caller may not see."""
    return f"TPUs of {plane.title} in {zone}"

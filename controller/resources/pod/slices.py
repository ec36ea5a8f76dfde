"""Every slice that has the pod's name: an abandoned request may yet become a second one, in another zone."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from controller.context import Context
from controller.gcp.errors import ForbiddenError
from controller.resources.pod.capacity_log import record_end
from controller.resources.pod.pending_deletion import deletions_here
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
        for zone in self.zones:
            for _, status in self._spec_at(context, zone):
                found.append(status)
                break
            if found and not any(rank(found[-1])[:3]):
                break
        best = min(found, key=rank, default=None)
        if best is not None and best.is_under_repair:
            context.fleets.expect_new_host_keys(best.uid)
        return best

    def delete(self, context: Context, condition: Callable[[SliceStatus], bool]) -> None:
        """Delete every slice that meets the condition; their data disks stay."""
        for zone in self.zones:
            for provisioner, status in self._spec_at(context, zone):
                if condition(status):
                    provisioner.delete(context, self.name, zone)
                    record_end(context, self.name, status)

    def _spec_at(self, context: Context, zone: str) -> Iterator[tuple[Provisioner, SliceStatus]]:
        for provisioner in self.provisioners.values():
            try:
                status = provisioner.observe(context, self.name, zone)
            except ForbiddenError as error:
                if len(self.zones) == 1:
                    raise
                if (place := hidden_zone(zone)) not in context.permission_denied:  # a zone closed to the project
                    context.permission_denied.add(place)
                    context.events.note(f"node/{self.name}", f"cannot look for the pod in {zone}: {error.message}")
                continue
            if status is not None:
                yield provisioner, status


def hidden_zone(zone: str) -> str:
    """Return the entry of `Context.permission_denied` for a zone in which the caller may not look for TPUs."""
    return f"TPUs in {zone}"

"""Find and delete the slices that exist under a pod's name, in any of its zones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from controller.context import Context
from controller.resources.pod.provisioner import Provisioner, ProvisionerName, SliceStatus


@dataclass(frozen=True)
class Slices:
    """Every slice of one name in some zones."""

    name: str
    zones: Sequence[str]
    provisioners: Mapping[ProvisionerName, Provisioner]

    def find(self, context: Context) -> SliceStatus | None:
        """Return a READY slice if there is one, else one that is coming up, else a dead one."""
        found: list[SliceStatus] = []
        for zone in self.zones:
            for _, status in self._spec_at(context, zone):
                found.append(status)
                break
            if found and found[-1].is_ready:
                return found[-1]
        return min(found, key=lambda status: not status.pending, default=None)

    def delete(self, context: Context, condition: Callable[[SliceStatus], bool]) -> None:
        """Delete every slice that meets the condition; their data disks stay."""
        for zone in self.zones:
            for provisioner, status in self._spec_at(context, zone):
                if condition(status):
                    provisioner.delete(context, self.name, zone)

    def _spec_at(self, context: Context, zone: str) -> Iterator[tuple[Provisioner, SliceStatus]]:
        for provisioner in self.provisioners.values():
            if (status := provisioner.observe(context, self.name, zone)) is not None:
                yield provisioner, status

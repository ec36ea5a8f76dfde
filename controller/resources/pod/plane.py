"""Interface of a plane: one of Google's APIs through which slices are made, found, reached and deleted.

`planes.py` lists the planes. Nothing outside a plane's own folder knows its API.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

from controller.context import Context
from controller.gcp.worker_vms import WorkerVms
from controller.resources.pod.provisioner import Place, Provisioner, ProvisionerName, SliceSpec, SliceStatus


class Plane(Protocol):
    """One API that holds slices."""

    @property
    def delete_permission(self) -> str:
        """Permission that the workers' service account needs so that a pod can delete itself."""
        ...

    def provisioners(self, create_seconds: float) -> Mapping[ProvisionerName, Provisioner]:
        """Return the ways to create a slice; one that may still bring up a slice later comes first.

        `create_seconds` is how long one creation may take.
        """
        ...

    def slices(self, context: Context) -> Iterator[SliceStatus]:
        """Yield every slice of the project and every request without one, in all zones, whoever made them."""
        ...

    def vms(self, context: Context, name: str, status: SliceStatus) -> WorkerVms:
        """Return the VMs of an observed slice."""
        ...

    def deletions(self, context: Context, name: str, zone: str) -> list[str]:
        """Return the URLs that delete a slice by the method DELETE, in order; those of what is absent answer 404."""
        ...

    def delete_by_hand(self, context: Context, name: str, zone: str) -> None:
        """Delete the VMs as Google does when it preempts them, and wait; what requested them stays.

        Raises:
            OperationFailedError: Google accepted the deletion, and then it failed.
        """
        ...

    def request_service_agent(self, context: Context, zone: str) -> None:
        """Request the account with which Google makes slices in the project."""
        ...

    def cannot_stop(self, name: str, spec: SliceSpec, place: Place) -> str:
        """Return why Google cannot stop such a slice and start it again, or ''."""
        ...

    def start(self, context: Context, name: str, zone: str, seconds: float) -> None:
        """Start a stopped slice within that many seconds. Raises GoogleError if there is no capacity."""
        ...

    def stop(self, context: Context, name: str, zone: str, seconds: float) -> None:
        """Stop a slice; after that, only its disks are billed."""
        ...

"""What SSH reads and changes of a pod's VMs through the API that made them."""

from collections.abc import Sequence
from typing import Protocol

from controller.gcp.client import GoogleClient
from controller.gcp.operations import Caller


class WorkerVms(Protocol):
    """The VMs of one pod. Every method may raise GoogleError; NotFoundError if the pod is gone."""

    def ssh_keys(self, google: GoogleClient) -> str:
        """Return the lines of `ssh-keys` that every VM has in its metadata."""
        ...

    def add_ssh_key(self, caller: Caller, line: str) -> None:
        """Add a line to the VMs' `ssh-keys`; other lines stay.

        Raises:
            ConflictError: another client changes a VM at this moment.
        """
        ...

    def guest_attributes(self, google: GoogleClient) -> Sequence[Sequence[dict[str, str]]]:
        """Return what each VM has published, in the order of the workers: items with namespace, key and value."""
        ...

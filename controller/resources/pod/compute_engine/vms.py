"""The VMs of a slice on Compute Engine, for SSH."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from controller.gcp.client import GoogleClient
from controller.gcp.errors import NotFoundError
from controller.gcp.operations import Caller, wait_compute
from controller.resources.pod.compute_engine.requests import API
from controller.resources.pod.compute_engine.states import metadata_of


@dataclass(frozen=True)
class InstanceVms:
    """Instances of one zone, in the order of the workers. Each has metadata of its own."""

    project: str
    zone: str
    names: tuple[str, ...]

    def ssh_keys(self, google: GoogleClient) -> str:
        lists = [metadata_of(self._get(google, name)).get("ssh-keys", "").splitlines() for name in self.names]
        return "\n".join(line for line in (lists[0] if lists else []) if all(line in other for other in lists))

    def add_ssh_key(self, caller: Caller, line: str) -> None:
        operations: list[dict[str, Any]] = []
        for name in self.names:
            metadata = self._get(caller.google, name).get("metadata", {})
            items = {item["key"]: item.get("value", "") for item in metadata.get("items", [])}
            lines = items.get("ssh-keys", "").splitlines()
            if line in lines:
                continue
            items["ssh-keys"] = "\n".join(filter(None, [*lines, line]))
            body = {
                "fingerprint": metadata.get("fingerprint", ""),
                "items": [{"key": key, "value": value} for key, value in items.items()],
            }
            operations.append(caller.google.call(API, "instances.setMetadata", **self._path(name), body=body))
        for operation in operations:
            wait_compute(caller, operation)

    def guest_attributes(self, google: GoogleClient) -> Sequence[Sequence[dict[str, str]]]:
        """See https://cloud.google.com/compute/docs/metadata/manage-guest-attributes. The VMs' names are known."""
        return [[*self._published(google, name), _hostname(name)] for name in self.names]

    def _published(self, google: GoogleClient, name: str) -> list[dict[str, str]]:
        try:
            answer = google.call(API, "instances.getGuestAttributes", **self._path(name), queryPath="hostkeys/")
        except NotFoundError:
            return []  # it has published nothing yet
        return answer.get("queryValue", {}).get("items", [])

    def _get(self, google: GoogleClient, name: str) -> dict[str, Any]:
        return google.call(API, "instances.get", **self._path(name))

    def _path(self, name: str) -> dict[str, str]:
        return {"project": self.project, "zone": self.zone, "instance": name}


def _hostname(name: str) -> dict[str, str]:
    return {"namespace": "guestInventory", "key": "hostname", "value": name}

"""A small Compute Engine VM that runs one startup script: the bastion, and the VM that fetches an asset."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Self

from controller.context import Context
from controller.gcp.errors import ConflictError, GoogleError, NotFoundError
from controller.gcp.names import LABEL, MARK
from controller.gcp.operations import wait_compute
from controller.reconcile.resource import Absent, Diff, ObservedResources, Pending, Resource
from controller.resources.project.accounts import ServiceAccount

IMAGE = "projects/debian-cloud/global/images/family/debian-12"
MIN_RUN_SECONDS = 30
"""Shortest maxRunDuration that Compute Engine accepts; the longest is 120 days."""
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
STARTING_STATES = frozenset({"PROVISIONING", "STAGING", "REPAIRING"})
ENDING_STATES = frozenset({"STOPPING", "SUSPENDING"})


@dataclass(frozen=True, kw_only=True)
class SmallVm(Resource):
    """A VM by its name (https://cloud.google.com/compute/docs/reference/rest/v1/instances); wanted is a RUNNING one."""

    zone: str = field(compare=False)
    machine_type: str = field(compare=False)
    network: str = field(compare=False)
    subnetwork: str = field(compare=False)
    external_ip: bool = field(compare=False)
    account: ServiceAccount = field(compare=False)
    status: str = "RUNNING"
    marked: bool = field(default=True, compare=False)

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name} ({self.machine_type}) in {self.zone}"

    @property
    def is_managed(self) -> bool:
        return self.marked

    @property
    def labels(self) -> dict[str, str]:
        """Labels besides Slipway's own."""
        return {}

    @property
    def max_seconds(self) -> float | None:
        """After this long running, Compute Engine deletes it; None: never."""
        return None

    def path(self, project: str) -> str:
        return f"projects/{project}/zones/{self.zone}/instances/{self.name}"

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Pending | Self:
        answer = self._get(context)
        if answer is None:
            return Absent()
        if answer["status"] in STARTING_STATES | ENDING_STATES:
            return Pending(answer["status"].lower())
        return self.read(answer)

    def _get(self, context: Context) -> dict[str, Any] | None:
        try:
            return context.google.call("compute", "instances.get", **self._instance_path(context), instance=self.name)
        except NotFoundError:
            return None

    def read(self, answer: dict[str, Any]) -> Self:
        marked = LABEL.items() <= answer.get("labels", {}).items()
        return replace(self, status=answer["status"], marked=marked)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        if diff.action != "create":
            self.destroy(context)
        try:
            body = self.body(context)
            answer = context.google.call("compute", "instances.insert", **self._instance_path(context), body=body)
            wait_compute(context, answer)
        except ConflictError:
            return  # created by someone else meanwhile; the next observation decides

    def destroy(self, context: Context) -> None:
        while (answer := self._get(context)) is not None:
            if not (current := self.read(answer)).is_managed:
                return
            if current.status in ENDING_STATES:  # already deleting itself
                context.clock.sleep(context.poll_seconds)
                continue
            try:
                answer = context.google.call(
                    "compute", "instances.delete", **self._instance_path(context), instance=self.name
                )
                wait_compute(context, answer)
            except NotFoundError:
                return
            except GoogleError as error:
                if error.reason not in ("resourceNotReady", "RESOURCE_NOT_READY"):
                    raise
                context.clock.sleep(context.poll_seconds)

    def body(self, context: Context) -> dict[str, Any]:
        place = f"projects/{context.project}"
        card: dict[str, Any] = {
            "network": f"{place}/global/networks/{self.network}",
            "subnetwork": f"{place}/regions/{self.zone.rpartition('-')[0]}/subnetworks/{self.subnetwork}",
        }
        if self.external_ip:
            card["accessConfigs"] = [{"name": "external-nat", "type": "ONE_TO_ONE_NAT"}]
        return {
            "name": self.name,
            "description": MARK,
            "labels": {**LABEL, **self.labels},
            "machineType": f"{place}/zones/{self.zone}/machineTypes/{self.machine_type}",
            "canIpForward": False,
            "deletionProtection": False,
            "disks": [
                {
                    "autoDelete": True,
                    "boot": True,
                    "initializeParams": {"sourceImage": IMAGE, **self.disk_parameters(context)},
                    "mode": "READ_WRITE",
                    "type": "PERSISTENT",
                }
            ],
            "metadata": {"items": [{"key": key, "value": value} for key, value in self.metadata().items()]},
            "networkInterfaces": [card],
            "scheduling": self._scheduling(),
            "serviceAccounts": [{"email": self.account.email(context), "scopes": [SCOPE]}],
        }

    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """Return its startup script, and what that reads, JSON, as the attribute `slipway`."""

    def disk_parameters(self, context: Context) -> dict[str, str]:
        """Return what its boot disk has besides the image; by default Compute Engine chooses 10 GB of a slow disk."""
        return {}

    def _scheduling(self) -> dict[str, Any]:
        """Return the options for restarts and the end: https://cloud.google.com/compute/docs/instances/limit-vm-runtime."""
        if self.max_seconds is None:
            return {"automaticRestart": True}
        seconds = max(MIN_RUN_SECONDS, round(self.max_seconds))
        limit = {"maxRunDuration": {"seconds": str(seconds)}, "instanceTerminationAction": "DELETE"}
        return {"automaticRestart": True, **limit}

    def serial_output(self, context: Context) -> str:
        """Return the output on its serial port; empty if unavailable."""
        try:
            answer = context.google.call(
                "compute", "instances.getSerialPortOutput", **self._instance_path(context), instance=self.name, port=1
            )  # fmt: skip
        except NotFoundError:
            return ""
        return answer.get("contents", "")

    def _instance_path(self, context: Context) -> dict[str, str]:
        return {"project": context.project, "zone": self.zone}

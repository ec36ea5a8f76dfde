"""The bastion, a small Compute Engine VM, and the archive of Slipway that it installs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.answers import LABEL, MARK, OPERATION_SECONDS, delete_when_ready, is_labelled, wait_compute
from controller.gcp.google_errors import ExistsError, NotFoundError
from controller.reconcile import Absent, Diff, ObservedResources, Pending, Resource, Scope
from controller.resources.accounts import ServiceAccount
from controller.resources.uploads.archives import CodeArchive

IMAGE = "projects/debian-cloud/global/images/family/debian-13"  # has the Python of conf/driver.txt
MIN_RUN_SECONDS = 30
"""Shortest maxRunDuration that Compute Engine accepts; the longest is 120 days."""
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
STARTING_STATES = frozenset({"PROVISIONING", "STAGING", "REPAIRING"})
ENDING_STATES = frozenset({"STOPPING", "SUSPENDING"})
RUN_LABEL, POD_LABEL = "slipway-run", "slipway-pod"


@dataclass(frozen=True, kw_only=True)
class Bastion(Resource):
    """The bastion that is RUNNING for this run.

    Another bastion of ours by that name is replaced: its run has ended, or could not start.
    https://cloud.google.com/compute/docs/reference/rest/v1/instances
    """

    kind: ClassVar[str] = "bastion"
    scope: ClassVar[Scope] = "pod"
    zone: str = field(compare=False)
    machine_type: str = field(compare=False)
    network: str = field(compare=False)
    subnetwork: str = field(compare=False)
    external_ip: bool = field(compare=False)
    account: ServiceAccount = field(compare=False)
    labels: Mapping[str, str] = field(compare=False)
    """Labels besides Slipway's own."""
    max_seconds: float | None = field(default=None, compare=False)
    """After this long running, Compute Engine deletes it; None: never."""
    status: str = "RUNNING"
    script: str = field(default="", compare=False, repr=False)
    orders: str = field(default="", compare=False, repr=False)
    run_id: str

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name} ({self.machine_type}) in {self.zone}"

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
            return self._call(context, "get")
        except NotFoundError:
            return None

    def read(self, answer: dict[str, Any]) -> Self:
        run_id = answer.get("labels", {}).get(RUN_LABEL, "")
        return replace(self, status=answer["status"], marked=is_labelled(answer), run_id=run_id)

    def is_for_its_run(self, context: Context) -> bool:
        """Return whether the VM is there, or will be in a moment, to drive this run."""
        answer = self._get(context)
        return answer is not None and answer["status"] not in ENDING_STATES and self.read(answer).run_id == self.run_id

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        if diff.action != "create":
            self.destroy(context)
        try:
            wait_compute(context, self._call(context, "insert", body=self.body(context)))
        except ExistsError:
            return  # created by someone else meanwhile; the next observation decides

    def destroy(self, context: Context) -> None:
        late = context.clock.deadline(OPERATION_SECONDS)
        while (answer := self._get(context)) is not None and self.read(answer).is_managed:
            if late():
                raise CloudError(f"{self.title} is still {answer['status'].lower()}; run the same command again later")
            if answer["status"] in ENDING_STATES:  # already deleting itself
                context.clock.sleep(context.poll_seconds)
                continue
            delete_when_ready(context, lambda: wait_compute(context, self._call(context, "delete")))

    def body(self, context: Context) -> dict[str, Any]:
        place = f"projects/{context.project}"
        card: dict[str, Any] = {
            "network": f"{place}/global/networks/{self.network}",
            "subnetwork": f"{place}/regions/{self.zone.rpartition('-')[0]}/subnetworks/{self.subnetwork}",
        }
        if self.external_ip:
            card["accessConfigs"] = [{"name": "external-nat", "type": "ONE_TO_ONE_NAT"}]
        scheduling: dict[str, Any] = {"automaticRestart": True}
        if self.max_seconds is not None:  # https://cloud.google.com/compute/docs/instances/limit-vm-runtime
            seconds = max(MIN_RUN_SECONDS, round(self.max_seconds))
            scheduling |= {"maxRunDuration": {"seconds": str(seconds)}, "instanceTerminationAction": "DELETE"}
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
                    "initializeParams": {"sourceImage": IMAGE},
                    "mode": "READ_WRITE",
                    "type": "PERSISTENT",
                }
            ],
            "metadata": {
                "items": [{"key": "startup-script", "value": self.script}, {"key": "slipway", "value": self.orders}]
            },
            "networkInterfaces": [card],
            "scheduling": scheduling,
            "serviceAccounts": [{"email": self.account.email(context), "scopes": [SCOPE]}],
            "shieldedInstanceConfig": {"enableSecureBoot": True},  # what constraints/compute.requireShieldedVm demands
        }

    def serial_output(self, context: Context) -> str:
        """Return the output on its serial port; empty if unavailable."""
        try:
            return self._call(context, "getSerialPortOutput", port=1).get("contents", "")
        except NotFoundError:
            return ""

    def _call(self, context: Context, verb: str, **parameters: Any) -> dict[str, Any]:
        where = {"project": context.project, "zone": self.zone} | ({} if verb == "insert" else {"instance": self.name})
        return context.google.call("compute", f"instances.{verb}", **where, **parameters)


@dataclass(frozen=True, kw_only=True)
class SlipwayPackage(CodeArchive):
    """Archive of the running Slipway itself, for the bastion."""

    kind: ClassVar[str] = "slipway"

    @property
    def title(self) -> str:
        return f"slipway {self.name[:12]} in the bucket ({self.snapshot.size})"

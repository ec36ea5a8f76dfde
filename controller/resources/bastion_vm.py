"""The bastion, a small Compute Engine VM; the roles of its service account; the archive of Slipway that it installs."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.gcp.answers import LABEL, MARK, wait_compute
from controller.gcp.google_errors import ConflictError, GoogleError, NotFoundError
from controller.reconcile import Absent, Diff, ObservedResources, Pending, Resource, Scope
from controller.resources.accounts import POLICY_VERSION, Policy, Roles, ServiceAccount
from controller.resources.uploads.archives import CodeArchive

IMAGE = "projects/debian-cloud/global/images/family/debian-12"
MIN_RUN_SECONDS = 30
"""Shortest maxRunDuration that Compute Engine accepts; the longest is 120 days."""
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
STARTING_STATES = frozenset({"PROVISIONING", "STAGING", "REPAIRING"})
ENDING_STATES = frozenset({"STOPPING", "SUSPENDING"})
RUN_LABEL, POD_LABEL = "slipway-run", "slipway-pod"
SECONDS_PER_DAY = 86_400


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
    status: str = "RUNNING"
    marked: bool = field(default=True, compare=False)
    pod: str = field(compare=False)
    script: str = field(default="", compare=False, repr=False)
    orders: str = field(default="", compare=False, repr=False)
    max_days: float | None = field(default=None, compare=False)
    """After so many days running, Compute Engine deletes it; None: never."""
    run_id: str

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name} ({self.machine_type}) in {self.zone}"

    @property
    def is_managed(self) -> bool:
        return self.marked

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
        labels = answer.get("labels", {})
        marked = LABEL.items() <= labels.items()
        return replace(self, status=answer["status"], marked=marked, run_id=labels.get(RUN_LABEL, ""))

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
            "labels": {**LABEL, RUN_LABEL: self.run_id, POD_LABEL: self.pod},
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
            "scheduling": self._scheduling(),
            "serviceAccounts": [{"email": self.account.email(context), "scopes": [SCOPE]}],
        }

    def _scheduling(self) -> dict[str, Any]:
        """Return the options for restarts and the end: https://cloud.google.com/compute/docs/instances/limit-vm-runtime."""
        if self.max_days is None:
            return {"automaticRestart": True}
        seconds = max(MIN_RUN_SECONDS, round(self.max_days * SECONDS_PER_DAY))
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


@dataclass(frozen=True, kw_only=True)
class BastionRoles(Roles):
    """Roles on the bastion only, whose policy is deleted with it (https://cloud.google.com/compute/docs/access)."""

    kind: ClassVar[str] = "bastion roles of"
    scope: ClassVar[Scope] = "pod"
    bastion: Bastion = field(compare=False)

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name} on {self.bastion.name}"

    def read(self, context: Context) -> Policy:
        return self._call_policy(context, "getIamPolicy", optionsRequestedPolicyVersion=POLICY_VERSION)

    def write(self, context: Context, policy: Policy) -> None:
        self._call_policy(context, "setIamPolicy", body={"policy": policy})

    def _call_policy(self, context: Context, verb: str, **more: Any) -> Any:
        where = {"project": context.project, "zone": self.bastion.zone, "resource": self.bastion.name}
        return context.google.call("compute", f"instances.{verb}", **where, **more)

    def gcloud_binding(self, context: Context) -> str:
        return f"compute instances add-iam-policy-binding {self.bastion.name} --zone={self.bastion.zone}"

    def destroy(self, context: Context) -> None:
        """Do nothing: the policy is deleted with the bastion."""


@dataclass(frozen=True, kw_only=True)
class AccountRoles(Roles):
    """Roles on another service account: whoever creates a pod must be allowed to run it as the workers' account.

    https://cloud.google.com/iam/docs/reference/rest/v1/projects.serviceAccounts/setIamPolicy
    """

    kind: ClassVar[str] = "account roles of"
    on: ServiceAccount = field(compare=False)

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name} on {self.on.name}"

    def read(self, context: Context) -> Policy:
        wanted = {"resource": self._resource(context), "options_requestedPolicyVersion": POLICY_VERSION}
        return context.google.call("iam", "projects.serviceAccounts.getIamPolicy", **wanted)

    def write(self, context: Context, policy: Policy) -> None:
        body = {"policy": policy}
        context.google.call("iam", "projects.serviceAccounts.setIamPolicy", resource=self._resource(context), body=body)

    def gcloud_binding(self, context: Context) -> str:
        return f"iam service-accounts add-iam-policy-binding {self.on.email(context)}"

    def _resource(self, context: Context) -> str:
        return f"projects/{context.project}/serviceAccounts/{self.on.email(context)}"


@dataclass(frozen=True, kw_only=True)
class SlipwayPackage(CodeArchive):
    """Archive of the running Slipway itself, for the bastion."""

    kind: ClassVar[str] = "slipway"

    @property
    def title(self) -> str:
        return f"slipway {self.name[:12]} in the bucket ({self.snapshot.size})"

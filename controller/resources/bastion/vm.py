"""The bastion, a small Compute Engine VM, and the permission of its service account to delete it."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.reconcile.resource import Scope
from controller.resources.bastion.small_vm import SmallVm
from controller.resources.project.accounts import ServiceAccount
from controller.resources.project.roles import POLICY_VERSION, Policy, Roles
from controller.resources.uploads.code import CodeArchive

RUN_LABEL, POD_LABEL = "slipway-run", "slipway-pod"
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Bastion(SmallVm):
    """The bastion that is RUNNING for this run.

    Another bastion of ours by that name is replaced: its run has ended, or could not start.
    """

    kind: ClassVar[str] = "bastion"
    scope: ClassVar[Scope] = "pod"
    pod: str = field(compare=False)
    script: str = field(default="", compare=False, repr=False)
    orders: str = field(default="", compare=False, repr=False)
    max_days: float | None = field(default=None, compare=False)
    run_id: str

    @property
    def labels(self) -> dict[str, str]:
        return {RUN_LABEL: self.run_id, POD_LABEL: self.pod}

    @property
    def max_seconds(self) -> float | None:
        return None if self.max_days is None else self.max_days * SECONDS_PER_DAY

    def metadata(self) -> dict[str, str]:
        return {"startup-script": self.script, "slipway": self.orders}

    def read(self, answer: dict[str, Any]) -> Self:
        return replace(super().read(answer), run_id=answer.get("labels", {}).get(RUN_LABEL, ""))


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

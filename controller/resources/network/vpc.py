"""The VPC network, its subnet in each region, and private Google access there."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.gcp.errors import ForbiddenError, NotFoundError
from controller.gcp.names import MARK, is_marked, leaf
from controller.gcp.operations import wait_compute
from controller.reconcile.resource import Absent, Diff, ObservedResources, Resource, Scope
from controller.resources.network.base import ComputeResource

SWITCH_RECORD = "switched on private Google access of subnet"


@dataclass(frozen=True, kw_only=True)
class Network(ComputeResource):
    """A VPC in custom or auto mode. An existing network of that name is used as it is, whoever created it."""

    kind: ClassVar[str] = "network"
    collection: ClassVar[str] = "networks"
    argument: ClassVar[str] = "network"
    auto: bool = field(default=False, compare=False)
    mtu: int | None = None

    def body(self, context: Context) -> dict[str, Any]:
        return {"autoCreateSubnetworks": self.auto, "mtu": self.mtu, "routingConfig": {"routingMode": "REGIONAL"}}

    def command(self, context: Context) -> str:
        mode = "auto" if self.auto else "custom"
        mtu = f" --mtu={self.mtu}" if self.mtu else ""
        return f"gcloud compute networks create {self.name} --subnet-mode={mode}{mtu} --project={context.project}"

    def read(self, answer: dict[str, Any]) -> Self:
        marked, mtu = is_marked(answer), answer.get("mtu", 1460)
        return replace(
            self, marked=marked, mtu=mtu if marked else self.mtu, auto=answer.get("autoCreateSubnetworks", False)
        )


@dataclass(frozen=True, kw_only=True)
class Subnet(ComputeResource):
    """The subnet in one region. `cidr` None accepts any range; `block` is the range of a new subnet."""

    kind: ClassVar[str] = "subnet"
    collection: ClassVar[str] = "subnetworks"
    argument: ClassVar[str] = "subnetwork"
    key: ClassVar[str] = "network.subnet"
    immutable: ClassVar[frozenset[str]] = frozenset({"cidr", "network"})
    network: str
    block: str = field(compare=False)
    cidr: str | None = None

    def body(self, context: Context) -> dict[str, Any]:
        return {
            "ipCidrRange": self.block,
            "network": f"projects/{context.project}/global/networks/{self.network}",
            "privateIpGoogleAccess": True,
        }

    def command(self, context: Context) -> str:
        return (
            f"gcloud compute networks subnets create {self.name} --network={self.network} --region={self.region} "
            f"--range={self.block} --enable-private-ip-google-access --project={context.project}"
        )

    def read(self, answer: dict[str, Any]) -> Self:
        return replace(self, marked=is_marked(answer), network=leaf(answer["network"]), cidr=answer["ipCidrRange"])


@dataclass(frozen=True, kw_only=True)
class PrivateAccess(Resource):
    """Private Google Access of a subnet, which lets workers without an external address reach Google's APIs.

    https://cloud.google.com/vpc/docs/private-google-access. It is also switched on in a subnet that is not ours, and
    off again by `down --all`. The switch itself carries no mark, so the description of our firewall rule `rule` for
    that subnet records, beforehand, that we switched it on.
    """

    kind: ClassVar[str] = "private Google access"
    scope: ClassVar[Scope] = "shared"
    region: str
    rule: str = field(compare=False)
    on: bool = True
    recorded: bool = field(default=False, compare=False)

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.region}/{self.name}"

    @property
    def title(self) -> str:
        return f"{self.kind} in subnet {self.name} in {self.region}"

    @property
    def is_managed(self) -> bool:
        return self.recorded

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        try:
            answer = self._subnet(context, "get")
        except NotFoundError:
            return Absent()
        on = answer.get("privateIpGoogleAccess", False) or self.id in context.permission_denied
        return replace(self, on=on, recorded=self._record_text() in self._rule(context).get("description", ""))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        """Switch it on. If this cannot be recorded or is not permitted, emit a note, since a NAT works too."""
        try:
            if is_marked(self._subnet(context, "get")) or self._record_switch(context):
                self._switch(context, on=True)
                return
        except ForbiddenError:
            pass
        context.permission_denied.add(self.id)
        message = f"private Google access is off in subnet {self.name}, which Slipway did not create; to turn it on"
        context.events.note(self.id, f"{message}: {self.command(context)}")

    def command(self, context: Context) -> str:
        return (
            f"gcloud compute networks subnets update {self.name} --region={self.region} "
            f"--enable-private-ip-google-access --project={context.project}"
        )

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if not isinstance(current, Absent) and current.recorded:
            self._switch(context, on=False)

    def _switch(self, context: Context, *, on: bool) -> None:
        body = {"privateIpGoogleAccess": on}
        wait_compute(context, self._subnet(context, "setPrivateIpGoogleAccess", body=body))

    def _record_switch(self, context: Context) -> bool:
        """Record that we switched it on; False if we have no firewall rule to record it in."""
        rule = self._rule(context)
        if not is_marked(rule):
            return False
        if self._record_text() not in rule["description"]:
            body = {"description": f"{MARK}; {self._record_text()}"}
            call = context.google.call(
                "compute", "firewalls.patch", project=context.project, firewall=self.rule, body=body
            )
            wait_compute(context, call)
        return True

    def _record_text(self) -> str:
        return f"{SWITCH_RECORD} {self.name}"

    def _rule(self, context: Context) -> dict[str, Any]:
        try:
            return context.google.call("compute", "firewalls.get", project=context.project, firewall=self.rule)
        except NotFoundError:
            return {}

    def _subnet(self, context: Context, verb: str, **parameters: Any) -> dict[str, Any]:
        where = {"project": context.project, "region": self.region, "subnetwork": self.name}
        return context.google.call("compute", f"subnetworks.{verb}", **where, **parameters)

"""The VPC network: its subnet in each region, private Google access there, router and NAT.

Networks, subnets, routers and firewall rules carry no labels; the mark in their description says who made them. Google
allows one NAT for all subnets of a network in a region, so an existing NAT is used, whichever router it is on. A router
that is not ours is never patched.
"""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.answers import MARK, delete_when_ready, is_marked, leaf, wait_compute
from controller.gcp.google_errors import ExistsError, ForbiddenError, GoogleError, NotFoundError
from controller.reconcile import Absent, Diff, ObservedResources, Resource, Scope

IN_USE_SECONDS = 300.0
"""How long Google may count a resource as in use after its last user was deleted."""


@dataclass(frozen=True, kw_only=True)
class ComputePart(Resource):
    """A global or regional resource of Compute Engine, or a part of one, reached by the name of that resource.

    https://cloud.google.com/compute/docs/reference/rest/v1
    """

    scope: ClassVar[Scope] = "shared"
    collection: ClassVar[str]
    region: str | None = field(default=None, compare=False)
    marked: bool = field(default=False, compare=False)

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.region}/{self.name}" if self.region else super().id

    @property
    def title(self) -> str:
        return f"{super().title} in {self.region}" if self.region else super().title

    def request(self, context: Context, verb: str, **parameters: Any) -> dict[str, Any]:
        """Send a request about the resource; the body of `insert` has its name."""
        where = {"project": context.project} | ({"region": self.region} if self.region else {})
        if verb != "insert":
            where[self.collection.removesuffix("s")] = self.name
        return context.google.call("compute", f"{self.collection}.{verb}", **where, **parameters)

    def look(self, context: Context) -> dict[str, Any] | None:
        """Return the resource as Google shows it; None if it does not exist."""
        try:
            return self.request(context, "get")
        except NotFoundError:
            return None


@dataclass(frozen=True, kw_only=True)
class ComputeResource(ComputePart):
    """A resource of its own, which is created, patched if it is ours, and deleted."""

    key: ClassVar[str] = "network.name"
    """Config key to change when an existing resource of that name conflicts."""
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Fields of the body that Google does not take in a patch, not even unchanged."""

    @abstractmethod
    def body(self, context: Context) -> dict[str, Any]:
        """Return the body of the insert request, without name and description."""

    @abstractmethod
    def command(self, context: Context) -> str:
        """Return the gcloud command that creates the resource."""

    @abstractmethod
    def read(self, answer: dict[str, Any]) -> Self:
        """Return the resource as observed."""

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        answer = self.look(context)
        return Absent() if answer is None else self.read(answer)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        """Create the resource, or patch it if it is ours.

        Raises CloudError if it is not ours and differs, or differs in a field that cannot be changed in place.
        """
        if diff.action == "create":
            body = {"name": self.name, "description": MARK, **self.body(context)}
            try:
                wait_compute(context, self.request(context, "insert", body=body))
            except ExistsError:
                return  # created by someone else meanwhile; the next observation decides
            except ForbiddenError as error:
                self.raise_not_permitted(context, error)
            return
        current = self.observe(context, observed)
        if not isinstance(current, Absent) and not current.is_managed:
            raise CloudError(
                f"{self.title} was not created by Slipway and differs ({diff}). Slipway does not change it: change it "
                f"yourself, or set {self.key} to another name"
            )
        if diff.action == "replace":
            raise CloudError(f"{self.title} exists with other settings ({diff}); change them, or change {self.key}")
        body = {key: value for key, value in self.body(context).items() if key not in self.fixed}
        wait_compute(context, self.request(context, "patch", body=body))

    def raise_not_permitted(self, context: Context, error: GoogleError) -> None:
        """Raise an error that says who may create the resource, and how."""
        raise CloudError(
            f"{self.title}: you may not create it ({error.message}); ask a project admin to run "
            f"`{self.command(context)}`, or set {self.key} to an existing one"
        ) from None

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if isinstance(current, Absent) or not current.is_managed:
            return
        delete_when_ready(context, lambda: wait_compute(context, self.request(context, "delete")), IN_USE_SECONDS)


SWITCH_RECORD = "switched on private Google access of subnet"


@dataclass(frozen=True, kw_only=True)
class Network(ComputeResource):
    """A VPC in custom or auto mode. An existing network of that name is used as it is, whoever created it."""

    kind: ClassVar[str] = "network"
    collection: ClassVar[str] = "networks"
    fixed: ClassVar[frozenset[str]] = frozenset({"autoCreateSubnetworks"})
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
        if "ipCidrRange" not in answer:  # stackType IPV6_ONLY
            raise CloudError(f"{self.title} has no IPv4 range, which workers need; set {self.key} to another one")
        return replace(self, marked=is_marked(answer), network=leaf(answer["network"]), cidr=answer["ipCidrRange"])


@dataclass(frozen=True, kw_only=True)
class PrivateAccess(ComputePart):
    """Private Google Access of a subnet, which lets workers without an external address reach Google's APIs.

    https://cloud.google.com/vpc/docs/private-google-access. It is also switched on in a subnet that is not ours, and
    off again by `down --all`. The switch itself carries no mark, so the description of our firewall rule `rule` for
    that subnet records, beforehand, that we switched it on.
    """

    kind: ClassVar[str] = "private Google access"
    collection: ClassVar[str] = "subnetworks"
    rule: str = field(compare=False)
    on: bool = True

    @property
    def title(self) -> str:
        return f"{self.kind} in subnet {self.name} in {self.region}"

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        if (answer := self.look(context)) is None:
            return Absent()
        on = answer.get("privateIpGoogleAccess", False) or self.id in context.permission_denied
        return replace(self, on=on, marked=self._record_text() in self._rule(context).get("description", ""))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        """Switch it on. If this cannot be recorded or is not permitted, emit a note, since a NAT works too."""
        try:
            if is_marked(self.request(context, "get")) or self._record_switch(context):
                self._switch(context, on=True)
                return
        except ForbiddenError:
            pass
        context.permission_denied.add(self.id)
        message = (
            f"private Google access is off in subnet {self.name}, which Slipway did not create; to turn it on: gcloud "
            f"compute networks subnets update {self.name} --region={self.region} --enable-private-ip-google-access "
            f"--project={context.project}"
        )
        context.events.note(self.id, message)

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if not isinstance(current, Absent) and current.is_managed:
            self._switch(context, on=False)

    def _switch(self, context: Context, *, on: bool) -> None:
        wait_compute(context, self.request(context, "setPrivateIpGoogleAccess", body={"privateIpGoogleAccess": on}))

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
        return context.google.find("compute", "firewalls.get", project=context.project, firewall=self.rule) or {}


@dataclass(frozen=True, kw_only=True)
class Router(ComputeResource):
    """Cloud Router (https://cloud.google.com/compute/docs/reference/rest/v1/routers)."""

    kind: ClassVar[str] = "router"
    collection: ClassVar[str] = "routers"
    immutable: ClassVar[frozenset[str]] = frozenset({"network"})
    network: str
    subnet: str

    def body(self, context: Context) -> dict[str, Any]:
        return {"network": f"projects/{context.project}/global/networks/{self.network}"}

    def command(self, context: Context) -> str:
        where = f"--region={self.region} --project={context.project}"
        nat = f"{self.name} --router={self.name} --auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges {where}"
        router = f"gcloud compute routers create {self.name} --network={self.network} {where}"
        return f"{router} && gcloud compute routers nats create {nat}"

    def read(self, answer: dict[str, Any]) -> Self:
        return replace(self, marked=is_marked(answer), network=leaf(answer["network"]))

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        current = super().observe(context, observed)
        if isinstance(current, Absent) and _another_router_serves(context, self):
            return replace(self, marked=False)
        return current


@dataclass(frozen=True, kw_only=True)
class Nat(ComputePart):
    """NAT gateway on our router of the same name: automatic addresses, all ranges of all subnets of the region.

    A NAT is not a resource of its own but an entry in the router, which is read and patched as a whole. It carries no
    mark, so it is ours if its router is. `Router.command` creates both.
    """

    kind: ClassVar[str] = "nat"
    collection: ClassVar[str] = "routers"
    network: str
    subnet: str

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        answer = self.look(context) or {}
        if any(_serves(nat, self.subnet) for nat in answer.get("nats", [])):
            return replace(self, marked=is_marked(answer))
        return replace(self, marked=False) if _another_router_serves(context, self) else Absent()

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        answer = self.request(context, "get")
        if not is_marked(answer):
            raise CloudError(
                f"router {self.name} was not created by Slipway and has no NAT for subnet {self.subnet}; add a NAT to "
                "it, or set network.nat=false"
            )
        ours = {
            "name": self.name,
            "natIpAllocateOption": "AUTO_ONLY",
            "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
        }
        self._replace_ours(context, answer, [ours])

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if not isinstance(current, Absent) and current.is_managed:
            self._replace_ours(context, self.request(context, "get"), [])

    def _replace_ours(self, context: Context, router: dict[str, Any], ours: list[dict[str, Any]]) -> None:
        others = [nat for nat in router.get("nats", []) if nat.get("name") != self.name]
        wait_compute(context, self.request(context, "patch", body={"nats": [*others, *ours]}))


ALL_SUBNETS = frozenset({"ALL_SUBNETWORKS_ALL_IP_RANGES", "ALL_SUBNETWORKS_ALL_PRIMARY_IP_RANGES"})


def _another_router_serves(context: Context, mine: Router | Nat) -> bool:
    """Return whether the NAT of another router of the network in the region already serves our subnet."""
    listed = context.google.list_all("compute", "routers.list", "items", project=context.project, region=mine.region)
    return any(
        router["name"] != mine.name
        and leaf(router.get("network", "")) == mine.network
        and any(_serves(nat, mine.subnet) for nat in router.get("nats", []))
        for router in listed
    )


def _serves(nat: dict[str, Any], subnet: str) -> bool:
    """Return whether a NAT translates the primary range of the subnet."""
    if nat.get("sourceSubnetworkIpRangesToNat") in ALL_SUBNETS:
        return True
    return subnet in {leaf(listed.get("name", "")) for listed in nat.get("subnetworks", [])}

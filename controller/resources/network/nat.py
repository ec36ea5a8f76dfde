"""Cloud Router and Cloud NAT: internet access for workers without an external address.

Google allows one NAT for all subnets of a network in a region, so an existing NAT is used, whichever router it is on.
A router that is not ours is never patched.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.errors import NotFoundError
from controller.gcp.names import is_marked, leaf
from controller.gcp.operations import wait_compute
from controller.reconcile.resource import Absent, Diff, ObservedResources
from controller.resources.network.base import ComputeResource

ALL_SUBNETS = frozenset({"ALL_SUBNETWORKS_ALL_IP_RANGES", "ALL_SUBNETWORKS_ALL_PRIMARY_IP_RANGES"})


@dataclass(frozen=True, kw_only=True)
class _RouterResource(ComputeResource):
    collection: ClassVar[str] = "routers"
    argument: ClassVar[str] = "router"
    network: str
    subnet: str

    def find_equivalent(self, context: Context) -> dict[str, Any] | None:
        """Return another router of the network in the region whose NAT already serves our subnet."""
        where = {"project": context.project, "region": self.region}
        for router in context.google.list_all("compute", "routers.list", "items", **where):
            here = router["name"] != self.name and leaf(router.get("network", "")) == self.network
            if here and any(nat_serves(nat, self.subnet) for nat in router.get("nats", [])):
                return router
        return None


@dataclass(frozen=True, kw_only=True)
class Router(_RouterResource):
    """Cloud Router (https://cloud.google.com/compute/docs/reference/rest/v1/routers)."""

    kind: ClassVar[str] = "router"
    immutable: ClassVar[frozenset[str]] = frozenset({"network"})

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
        if isinstance(current, Absent) and self.find_equivalent(context):
            return replace(self, marked=False)
        return current


@dataclass(frozen=True, kw_only=True)
class Nat(_RouterResource):
    """NAT gateway on our router of the same name: automatic addresses, all ranges of all subnets of the region.

    A NAT is not a resource of its own but an entry in the router, which is read and patched as a whole. It carries no
    mark, so it is ours if its router is.
    """

    kind: ClassVar[str] = "nat"

    def body(self, context: Context) -> dict[str, Any]:
        return {
            "name": self.name,
            "natIpAllocateOption": "AUTO_ONLY",
            "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
        }

    def command(self, context: Context) -> str:
        flags = f"--router={self.name} --region={self.region} --project={context.project}"
        ranges = "--auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges"
        return f"gcloud compute routers nats create {self.name} {flags} {ranges}"

    def read(self, answer: dict[str, Any]) -> Self:
        return replace(self, marked=is_marked(answer))

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        try:
            answer = self.request(context, "get", router=self.name)
        except NotFoundError:
            answer = {}
        if any(nat_serves(nat, self.subnet) for nat in answer.get("nats", [])):
            return self.read(answer)
        other = self.find_equivalent(context)
        return Absent() if other is None else replace(self, marked=False)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        answer = self.request(context, "get", router=self.name)
        if not is_marked(answer):
            raise CloudError(
                f"router {self.name} was not created by Slipway and has no NAT for subnet {self.subnet}; add a NAT to "
                "it, or set network.nat=false"
            )
        others = [nat for nat in answer.get("nats", []) if nat.get("name") != self.name]
        self._patch(context, [*others, self.body(context)])

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if isinstance(current, Absent) or not current.is_managed:
            return
        answer = self.request(context, "get", router=self.name)
        self._patch(context, [nat for nat in answer.get("nats", []) if nat.get("name") != self.name])

    def _patch(self, context: Context, nats: list[dict[str, Any]]) -> None:
        wait_compute(context, self.request(context, "patch", router=self.name, body={"nats": nats}))


def nat_serves(nat: dict[str, Any], subnet: str) -> bool:
    """Return whether a NAT translates the primary range of the subnet."""
    if nat.get("sourceSubnetworkIpRangesToNat") in ALL_SUBNETS:
        return True
    return subnet in {leaf(listed.get("name", "")) for listed in nat.get("subnetworks", [])}

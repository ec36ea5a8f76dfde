"""The VPC network and its one subnet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from controller.operations import wait_compute
from controller.resource import Diff
from controller.resources.compute import MARK, ComputeResource, leaf

if TYPE_CHECKING:
    from controller.world import World


@dataclass(frozen=True, kw_only=True)
class Network(ComputeResource):
    """A custom-mode VPC. An existing network of that name is used as it is, whoever made it."""

    kind: ClassVar[str] = "network"
    collection: ClassVar[str] = "networks"
    argument: ClassVar[str] = "network"
    mtu: int | None = None

    def body(self, world: World) -> dict[str, Any]:
        return {"autoCreateSubnetworks": False, "mtu": self.mtu, "routingConfig": {"routingMode": "REGIONAL"}}

    def read(self, answer: dict[str, Any]) -> Self:
        marked = answer.get("description") == MARK
        mtu = answer.get("mtu", 1460)
        return replace(self, marked=marked, mtu=mtu if marked else self.mtu)


@dataclass(frozen=True, kw_only=True)
class Subnet(ComputeResource):
    """The subnet in the zone's region; workers without external address reach Google's APIs through it."""

    kind: ClassVar[str] = "subnet"
    collection: ClassVar[str] = "subnetworks"
    argument: ClassVar[str] = "subnetwork"
    fixed: ClassVar[frozenset[str]] = frozenset({"cidr", "network"})
    network: str
    cidr: str
    private_google_access: bool = True

    def body(self, world: World) -> dict[str, Any]:
        return {
            "ipCidrRange": self.cidr,
            "network": f"projects/{world.project}/global/networks/{self.network}",
            "privateIpGoogleAccess": self.private_google_access,
        }

    def read(self, answer: dict[str, Any]) -> Self:
        return replace(
            self,
            marked=answer.get("description") == MARK,
            network=leaf(answer["network"]),
            cidr=answer["ipCidrRange"],
            private_google_access=answer.get("privateIpGoogleAccess", False),
        )

    def update(self, world: World, diff: Diff) -> None:
        body = {"privateIpGoogleAccess": self.private_google_access}
        operation = self.request(world, "setPrivateIpGoogleAccess", subnetwork=self.name, body=body)
        wait_compute(world, operation)

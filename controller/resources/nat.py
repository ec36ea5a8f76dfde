"""Cloud Router and Cloud NAT: the way out for workers without an external address."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from controller.errors import CloudError
from controller.google import NotFound
from controller.operations import wait_compute
from controller.resource import Absent, Diff, Have
from controller.resources.compute import MARK, ComputeResource, leaf

if TYPE_CHECKING:
    from controller.world import World


@dataclass(frozen=True, kw_only=True)
class Router(ComputeResource):
    """https://cloud.google.com/compute/docs/reference/rest/v1/routers"""

    kind: ClassVar[str] = "router"
    collection: ClassVar[str] = "routers"
    argument: ClassVar[str] = "router"
    fixed: ClassVar[frozenset[str]] = frozenset({"network"})
    network: str

    def body(self, world: World) -> dict[str, Any]:
        return {"network": f"projects/{world.project}/global/networks/{self.network}"}

    def read(self, answer: dict[str, Any]) -> Self:
        return replace(self, marked=answer.get("description") == MARK, network=leaf(answer["network"]))


@dataclass(frozen=True, kw_only=True)
class Nat(ComputeResource):
    """One NAT gateway of our router: automatic addresses, all ranges of all subnets of the region.

    A NAT is no resource of its own but an entry in the router, which is read and patched as a whole; it can carry no
    mark, so it is ours if its router is. A router that is not ours is never patched.
    """

    kind: ClassVar[str] = "nat"
    collection: ClassVar[str] = "routers"
    argument: ClassVar[str] = "router"
    router: str

    def body(self, world: World) -> dict[str, Any]:
        return {
            "name": self.name,
            "natIpAllocateOption": "AUTO_ONLY",
            "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
        }

    def read(self, answer: dict[str, Any]) -> Self:
        return replace(self, marked=answer.get("description") == MARK)

    def observe(self, world: World, have: Have) -> Absent | Self:
        try:
            answer = self.request(world, "get", router=self.router)
        except NotFound:
            return Absent()
        entries = answer.get("nats", [])
        if any(nat.get("name") == self.name for nat in entries):
            return self.read(answer)
        if entries and answer.get("description") != MARK:
            return self.read(answer)  # someone's router with a NAT of its own does the work
        return Absent()

    def apply(self, world: World, have: Have, diff: Diff) -> None:
        answer = self.request(world, "get", router=self.router)
        if answer.get("description") != MARK:
            raise CloudError(
                f"router {self.router} was not made by slipway and has no NAT; add one to it, or set network.nat=false"
            )
        others = [nat for nat in answer.get("nats", []) if nat.get("name") != self.name]
        self._patch(world, [*others, self.body(world)])

    def destroy(self, world: World) -> None:
        seen = self.observe(world, {})
        if isinstance(seen, Absent) or not seen.ours:
            return
        answer = self.request(world, "get", router=self.router)
        self._patch(world, [nat for nat in answer.get("nats", []) if nat.get("name") != self.name])

    def _patch(self, world: World, nats: list[dict[str, Any]]) -> None:
        wait_compute(world, self.request(world, "patch", router=self.router, body={"nats": nats}))

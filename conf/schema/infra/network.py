"""The workers' VPC network."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from conf.schema.base import Name, Strict

ANYWHERE = "0.0.0.0/0"
IAP_RANGE = "35.235.240.0/20"
"""Source range of Google's Identity-Aware Proxy: https://cloud.google.com/iap/docs/using-tcp-forwarding"""
Cidr = Annotated[str, StringConstraints(pattern=r"^\d{1,3}(\.\d{1,3}){3}/\d{1,2}$")]


class Network(Strict):
    """VPC network of the workers. Existing resources with these names are used unchanged."""

    name: Name
    mode: Literal["custom", "auto"] = Field(
        description="How a new network gets subnets. custom: Slipway creates one per region. auto: Google creates them."
    )
    subnet: Name | None = Field(description="Subnet name per region. null: <name>-<region>; auto mode: <name>.")
    cidr: Cidr | None = Field(description="IP range of the subnet. null: the region's block in conf/regions.yaml.")
    mtu: int = Field(ge=1300, le=8896, description="MTU in bytes of a new network.")
    nat: bool = Field(description="Create a Cloud NAT for workers without an external IP address.")
    ssh_source_ranges: tuple[Cidr, ...] = Field(description="IP ranges allowed to reach port 22 of a worker.")
    laptop: Literal["auto"] | Cidr | None = Field(
        description="This machine's IP range, allowed too. auto: ask a public service. null: not allowed."
    )
    open_to_world: bool = Field(description="Allow every address to reach port 22.")

    @property
    def all_ssh_source_ranges(self) -> tuple[str, ...]:
        """All ranges allowed to reach port 22 of a worker, except a laptop whose address is not known yet."""
        laptop = {self.laptop} - {None, "auto"}
        return tuple(sorted({*self.ssh_source_ranges, *filter(None, laptop), *([ANYWHERE] * self.open_to_world)}))

    def subnet_name(self, region: str) -> str:
        """Return the subnet's name in a region. In an auto mode network, Google names subnets after the network."""
        return self.subnet or (self.name if self.mode == "auto" else f"{self.name}-{region}")

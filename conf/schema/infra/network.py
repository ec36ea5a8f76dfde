"""The VPC that the workers are in."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from conf.schema.base import Name, Strict

ANYWHERE = "0.0.0.0/0"
IAP_RANGE = "35.235.240.0/20"
"""Where Google's Identity-Aware Proxy comes from: https://cloud.google.com/iap/docs/using-tcp-forwarding"""
Cidr = Annotated[str, StringConstraints(pattern=r"^\d{1,3}(\.\d{1,3}){3}/\d{1,2}$")]


class Network(Strict):
    """The VPC; what exists of it under these names is adopted as it is."""

    name: Name
    mode: Literal["custom", "auto"] = Field(
        description="who makes subnets in a network that is created: slipway, one per region of the zones, or Google"
    )
    subnet: Name | None = Field(description="name of the subnet in each region; null: <name>-<region>, auto: <name>")
    cidr: Cidr | None = Field(description="range of the subnet; null: the region's own block in conf/regions.yaml")
    mtu: int = Field(ge=1300, le=8896, description="bytes; of a network that is created")
    nat: bool = Field(description="Cloud NAT, so that workers without external address reach the internet")
    ssh_source_ranges: tuple[Cidr, ...] = Field(description="who may reach port 22 of a worker")
    laptop: Literal["auto"] | Cidr | None = Field(
        description="further, this machine: its range, or auto (a public service is asked for its address); null: no"
    )
    open_to_world: bool = Field(description="further, everybody")

    @property
    def all_ssh_source_ranges(self) -> tuple[str, ...]:
        """Who may reach port 22 of a worker, all in all; without a laptop whose address is not known yet."""
        laptop = {self.laptop} - {None, "auto"}
        return tuple(sorted({*self.ssh_source_ranges, *filter(None, laptop), *([ANYWHERE] * self.open_to_world)}))

    def subnet_name(self, region: str) -> str:
        """The subnet's name in a region; Google's own in an auto mode network is called as the network."""
        return self.subnet or (self.name if self.mode == "auto" else f"{self.name}-{region}")

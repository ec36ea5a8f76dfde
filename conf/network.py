"""The VPC that the workers are in."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from conf.strict import Name, Strict

Cidr = Annotated[str, StringConstraints(pattern=r"^\d{1,3}(\.\d{1,3}){3}/\d{1,2}$")]


class Network(Strict):
    """The VPC; an existing one of that name is adopted as it is."""

    name: Name
    cidr: Cidr = Field(description="range of the subnet in the zone's region")
    mtu: int = Field(ge=1300, le=8896, description="bytes")
    nat: bool = Field(description="Cloud NAT, so that workers without external address reach the internet")
    ssh_source_ranges: tuple[Cidr, ...] = Field(description="who may reach port 22 of a worker")

"""The slice that a run wants, and where and how it may be had."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from conf.schema.base import VOLATILE, Name, Strict, Zone
from conf.schema.infra.topology import UnknownTypeError, find_topology

Tier = Literal["on_demand", "spot", "preemptible", "reserved", "flex_start"]
NODE_GENERATIONS = frozenset({"v2", "v3"})
"""What provisioner=auto makes as plain nodes; every later generation is queued for."""


def _as_tuple(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Tpu(Strict):
    """The slice."""

    accelerator_type: str = Field(description="as in tpu_types.yaml, e.g. v5litepod-16")
    zone: Annotated[Zone, VOLATILE] = Field(description="where the pod is wanted first")
    fallback_zones: Annotated[tuple[Zone, ...], VOLATILE] = Field(
        description="further zones, tried in order after `zone`"
    )
    name: Annotated[Name | None, VOLATILE] = Field(description="node name; null: derived from cloud, tpu and network")
    runtime_version: str | None = Field(description="VM image; null: the one Google documents for the generation")
    capacity: Annotated[tuple[Tier, ...], BeforeValidator(_as_tuple, Tier | tuple[Tier, ...]), VOLATILE] = Field(
        description="one word or an ordered list, tried in order; spot is cheaper and may be taken away"
    )
    provisioner: Annotated[Literal["auto", "node", "queued"], VOLATILE] = Field(
        description="node: asked for at once; queued: a request that waits for capacity; auto: queued from v4 on"
    )
    valid_until_hours: Annotated[float | None, VOLATILE] = Field(
        gt=0, description="a queued request expires after so many hours; null: never"
    )
    reservation: Annotated[str | None, VOLATILE] = Field(
        min_length=1, description="name of the reservation that capacity=reserved draws on"
    )
    adopt: Annotated[bool, VOLATILE] = Field(
        description="use the existing pod called tpu.name; it is never created, changed or deleted"
    )
    external_ip: Annotated[bool, VOLATILE] = Field(description="give each worker an external address")
    data_disk_gb: Annotated[int | None, VOLATILE] = Field(
        ge=10, le=65536, description="size of a disk at /mnt/data that outlives a preemption; null: none"
    )
    create_timeout_minutes: Annotated[float, VOLATILE] = Field(
        gt=0, description="give up on one creation after this many minutes, and on waiting where there is another place"
    )

    @field_validator("accelerator_type")
    @classmethod
    def known(cls, value: str) -> str:
        try:
            find_topology(value)
        except UnknownTypeError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("capacity")
    @classmethod
    def once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("names no tier")
        if len(set(value)) != len(value):
            raise ValueError("names a tier twice")
        return value

    @property
    def all_zones(self) -> tuple[str, ...]:
        """Where the pod may be, the wanted zone first."""
        return tuple(dict.fromkeys((self.zone, *self.fallback_zones)))

    def is_queued(self, tier: str) -> bool:
        """Is this tier asked for through a queued resource? flex_start always is, preemptible only if told so."""
        if tier == "flex_start":
            return True
        if self.provisioner != "auto":
            return self.provisioner == "queued"
        return tier != "preemptible" and find_topology(self.accelerator_type).generation not in NODE_GENERATIONS

"""The slice that a run needs, and where and how to get it."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from conf.schema.base import VOLATILE, Name, Strict, Zone
from conf.schema.infra.topology import UnknownTypeError, find_topology, known_type

Tier = Literal["on_demand", "spot", "preemptible", "reserved", "flex_start"]
NODE_GENERATIONS = frozenset({"v2", "v3"})
"""Generations that provisioner=auto creates as plain nodes. Later ones use queued resources."""


def _as_tuple(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Tpu(Strict):
    """The TPU slice."""

    accelerator_type: str = Field(
        description="Slice type from conf/tpu_types.yaml, e.g. v6e-8, or generation and topology, e.g. v6e:2x4."
    )
    plane: Annotated[str, VOLATILE] = Field(
        description="Google's API that the slice comes from: tpu_api, compute_engine, or auto, which asks every plane "
        "that has the type, in turn, until one has capacity.",
        examples=["auto", "tpu_api", "compute_engine"],
    )
    machine_type: Annotated[str | None, VOLATILE] = Field(
        description="On Compute Engine: type of the slice's VMs, e.g. ct6e-standard-4t. null: the fewest VMs."
    )
    boot_disk_gb: Annotated[int, VOLATILE] = Field(
        ge=100, le=65536, description="On Compute Engine: size in GB of each VM's boot disk."
    )
    max_run_hours: Annotated[float | None, VOLATILE] = Field(
        ge=0.5,
        le=2880,
        description="On Compute Engine: hours after which Google itself deletes the pod, even if every "
        "controller is gone. null: as long as the budget allows, if there is one. flex_start needs one (168 at most).",
    )
    zone: Annotated[Zone, VOLATILE] = Field(description="Zone to try first.")
    fallback_zones: Annotated[tuple[Zone, ...], VOLATILE] = Field(description="Zones to try next, in order.")
    name: Annotated[Name | None, VOLATILE] = Field(description="TPU node name. null: set from cloud, tpu and network.")
    runtime_version: str | None = Field(description="VM image. null: the image Google documents for the generation.")
    capacity: Annotated[tuple[Tier, ...], BeforeValidator(_as_tuple, Tier | tuple[Tier, ...]), VOLATILE] = Field(
        description="Capacity tier, or a list of tiers to try in order. Spot is cheaper but can be preempted."
    )
    provisioner: Annotated[Literal["auto", "node", "queued"], VOLATILE] = Field(
        description="node: create directly. queued: request a queued resource. auto: queued from v4 on."
    )
    valid_until_hours: Annotated[float | None, VOLATILE] = Field(
        gt=0, description="Hours until a queued request expires. null: never."
    )
    reservation: Annotated[str | None, VOLATILE] = Field(
        min_length=1, description="Name of the reservation that capacity=reserved uses."
    )
    adopt: Annotated[bool, VOLATILE] = Field(
        description="Use the existing pod named tpu.name. Slipway never creates, changes or deletes it."
    )
    external_ip: Annotated[bool | None, VOLATILE] = Field(
        description="Give each worker an external IP address. null: only if network.nat=false, ssh.method=external or "
        "network.laptop is set."
    )
    data_disk_gb: Annotated[int | None, VOLATILE] = Field(
        ge=10, le=65536, description="Size in GB of a disk at /mnt/data that survives preemption. null: no disk."
    )
    create_timeout_minutes: Annotated[float, VOLATILE] = Field(
        gt=0, description="Limit for one creation, and for waiting while there is another zone or tier."
    )

    @field_validator("accelerator_type")
    @classmethod
    def _known_type(cls, value: str) -> str:
        try:
            return known_type(value)
        except UnknownTypeError as error:
            raise ValueError(str(error)) from None

    @field_validator("capacity")
    @classmethod
    def _unique_tiers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("must list at least one tier")
        if len(set(value)) != len(value):
            raise ValueError("lists a tier twice")
        return value

    @model_validator(mode="after")
    def _known_machine(self) -> Self:
        if self.machine_type is not None:
            try:
                find_topology(self.accelerator_type, self.machine_type)
            except UnknownTypeError as error:
                raise ValueError(f"machine_type: {error}") from None
        return self

    @property
    def plane_of_name(self) -> str:
        """The plane that is a part of the pod's name; '' where the name is as it was when there was one plane."""
        facts = find_topology(self.accelerator_type)
        if self.plane == "auto":
            return "" if facts.on_tpu_api and self.machine_type is None else "compute_engine"
        return "" if self.plane == "tpu_api" and not facts.image_family else self.plane

    @property
    def all_zones(self) -> tuple[str, ...]:
        """Zones where the pod may be, the preferred one first."""
        return tuple(dict.fromkeys((self.zone, *self.fallback_zones)))

    def is_queued(self, tier: str) -> bool:
        """Return whether to queue for this tier: flex_start always, preemptible only with provisioner=queued."""
        if tier == "flex_start":
            return True
        if self.provisioner != "auto":
            return self.provisioner == "queued"
        return tier != "preemptible" and find_topology(self.accelerator_type).generation not in NODE_GENERATIONS

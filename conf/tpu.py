"""The slice that a run wants."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from conf.strict import VOLATILE, Name, Strict
from conf.topology import UnknownType, topology


class Tpu(Strict):
    """The slice."""

    accelerator_type: str = Field(description="as in tpu_types.yaml, e.g. v5litepod-16")
    zone: Annotated[Annotated[str, StringConstraints(pattern=r"^[a-z]+-[a-z]+\d+-[a-z0-9]+$")], VOLATILE]
    name: Annotated[Name | None, VOLATILE] = Field(description="node name; null: derived from cloud, tpu and network")
    runtime_version: str | None = Field(description="VM image; null: the one Google documents for the generation")
    capacity: Annotated[Literal["on_demand", "spot"], VOLATILE] = Field(
        description="spot is cheaper and may be taken away"
    )
    external_ip: Annotated[bool, VOLATILE] = Field(description="give each worker an external address")
    create_minutes: Annotated[float, VOLATILE] = Field(
        gt=0, description="give up on one creation after this many minutes"
    )

    @field_validator("accelerator_type")
    @classmethod
    def known(cls, value: str) -> str:
        try:
            topology(value)
        except UnknownType as error:
            raise ValueError(str(error)) from None
        return value

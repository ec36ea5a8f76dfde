"""Whose cloud."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from conf.network import Cidr
from conf.strict import Name, Strict


class GcpCloud(Strict):
    """Google Cloud."""

    kind: Literal["gcp"]
    project: str | None = Field(description="project id; null: GOOGLE_CLOUD_PROJECT or gcloud's active configuration")
    apis: tuple[str, ...] = Field(description="services to enable; never disabled again")
    service_account: Name = Field(description="account id the workers run as; created on first use")
    roles: tuple[str, ...] = Field(description="project roles of that account")
    bucket: str | None = Field(description="bucket of code, assets and runs; null: <project>-slipway-<region>")
    ssh_source_ranges: tuple[Cidr, ...] = Field(description="who may reach port 22 of a worker")


class LocalCloud(GcpCloud):
    """The emulated cloud on loopback."""

    kind: Literal["local"]  # pyright: ignore[reportIncompatibleVariableOverride]
    port: int = Field(ge=0, le=65535, description="TCP port of the emulated cloud; 0: any free one")
    operation_seconds: float = Field(ge=0, description="seconds an emulated operation takes")
    faults: tuple[dict[str, Any], ...] = Field(
        description="scripted misfortune, e.g. {kind: preempted, after_seconds: 20}"
    )


Cloud = Annotated[GcpCloud | LocalCloud, Field(discriminator="kind")]

"""The controller's sections of the config: where a run lives and how it gets there. The values are in YAML."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from conf.strict import VOLATILE, Name, Strict
from conf.topology import UnknownType, topology

Cidr = Annotated[str, StringConstraints(pattern=r"^\d{1,3}(\.\d{1,3}){3}/\d{1,2}$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


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


class Network(Strict):
    """The VPC; an existing one of that name is adopted as it is."""

    name: Name
    cidr: Cidr = Field(description="range of the subnet in the zone's region")
    mtu: int = Field(ge=1300, le=8896, description="bytes")
    nat: bool = Field(description="Cloud NAT, so that workers without external address reach the internet")
    ssh_source_ranges: tuple[Cidr, ...] = Field(description="who may reach port 22 of a worker")


class RemoteFile(Strict):
    url: Annotated[str, StringConstraints(pattern=r"^https?://")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = Field(description="refused if it differs")


class Dataset(Strict):
    """Either a local path, or files to download. What counts for a run's identity is their content, not their place."""

    path: Annotated[str | None, VOLATILE] = Field(default=None, description="a local file or folder")
    files: Annotated[dict[str, RemoteFile], VOLATILE] = Field(default={}, description="file name: where it is fetched")

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if (self.path is None) == (not self.files):
            raise ValueError("give either path (local) or files (downloads)")
        return self


class Assets(Strict):
    """What is copied to the bucket. `assets://NAME/FILE` in the config means the copy."""

    datasets: dict[Name, Dataset]


class Program(Strict):
    kind: Literal["trainer", "command"]
    command: tuple[str, ...] = Field(description="argument list of program=command, run on every worker at once")


class Code(Strict):
    max_mb: Annotated[float, VOLATILE] = Field(gt=0, description="refuse to ship an archive larger than this, MB")


class Env(Strict):
    """The Python of the workers."""

    python: Annotated[str, StringConstraints(pattern=r"^3\.\d+(\.\d+)?$")] = Field(description="version for uv venv")
    packages: Literal["lock", "image"] = Field(
        description="lock: the pinned, hashed requirements; image: what the worker's own Python has installed"
    )
    vars: dict[EnvName, str] = Field(description="environment of the program; no secrets here, they would be recorded")


class Ssh(Strict):
    user: Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]
    connect_seconds: float = Field(gt=0)
    warm_up_seconds: float = Field(gt=0, description="how long a fresh worker may refuse SSH")


class Run(Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-_a-z0-9]{0,40}[a-z0-9])?$")]
    seed: int = Field(ge=0, lt=2**31)
    state_dir: Annotated[str, VOLATILE] = Field(description="keys, events and the emulated cloud live here")


class Recovery(Strict):
    max_preemptions: int = Field(ge=0, description="replace the pod at most this often in one run")
    max_create_attempts: int = Field(ge=1, description="creations that may fail for want of capacity")
    poll_seconds: float = Field(gt=0, description="how often the node's state is asked for while a run is followed")


class Cleanup(Strict):
    on_success: Literal["delete", "keep"] = Field(description="the pod, once the run has finished")
    on_failure: Literal["delete", "keep"] = Field(description="the pod, once the program has failed")

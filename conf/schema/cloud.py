"""The cloud: its project, accounts, bucket and network, spending limits; and IAM: what permissions methods need.

The permissions of Google's methods, and the roles that contain them, are in `permissions.yaml`.
"""

from datetime import date
from fnmatch import fnmatchcase
from functools import cache
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, field_validator

import conf
from conf.schema.base import Name, Strict, Zone, check_home
from conf.schema.topology import read_table

ANYWHERE = "0.0.0.0/0"
IAP_RANGE = "35.235.240.0/20"
"""Source range of Google's Identity-Aware Proxy: https://cloud.google.com/iap/docs/using-tcp-forwarding"""


def check_block(value: str) -> str:
    """Reject a range of addresses that is none, or that Google would have to guess."""
    try:
        block = str(IPv4Interface(value).network)
    except ValueError as error:
        raise ValueError(f"{error}; use a range of IPv4 addresses such as 10.80.0.0/20") from None
    if block != value:
        raise ValueError(f"{value} has bits behind /{block.rpartition('/')[2]}; write {block}")
    return value


Cidr = Annotated[str, StringConstraints(pattern=r"^\d{1,3}(\.\d{1,3}){3}/\d{1,2}$"), AfterValidator(check_block)]


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


BillingAccount = Annotated[str, StringConstraints(pattern=r"^[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}$")]


class Budget(Strict):
    """Limits that end a run: the pod is deleted, the checkpoints stay."""

    max_usd: float | None = Field(gt=0, description="Limit in USD for all pods of the run. null: no limit.")
    max_hours: float | None = Field(gt=0, description="Limit in hours for all pods of the run. null: no limit.")
    usd_per_hour: float | None = Field(
        ge=0, description="Your price in USD per hour for the whole slice. null: the list price in conf/tpu_types.yaml."
    )


class Trc(Strict):
    """Grant of the TPU Research Cloud (https://sites.research.google/trc). Only TPUs in its zones are free."""

    zones: tuple[Zone, ...] = Field(min_length=1, description="Zones in the grant, as listed in the email.")
    free_until: date = Field(description="Last day of the grant, e.g. 2026-12-31.")


class BillingBudget(Strict):
    """Budget on the billing account. It emails the account's admins and stops nothing."""

    account: BillingAccount = Field(description="Billing account ID, as listed by `gcloud billing accounts list`.")
    usd: int = Field(ge=1, description="Budget in USD per month.")
    thresholds: tuple[float, ...] = Field(min_length=1, description="Fractions that trigger an email, e.g. 0.5.")


Account = Annotated[
    str, StringConstraints(pattern=r"^([a-z]([-a-z0-9]{0,61}[a-z0-9])?|[a-z0-9-]+@[a-z0-9.-]+\.gserviceaccount\.com)$")
]
"""An account ID in the project, `default`, or the full address of a service account."""
PROJECT = r"^([a-z0-9][a-z0-9.-]*:[a-z0-9]|[a-z])[a-z0-9-]{0,62}$"
"""A project ID, `my-project` or `example.com:my-project`. It becomes part of URLs and local folder names."""
Project = Annotated[str, StringConstraints(pattern=PROJECT)]
Service = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
Role = Annotated[str, StringConstraints(pattern=r"^(roles|projects/[^/\s]+/roles|organizations/\d+/roles)/[\w.]+$")]
Location = Annotated[str, StringConstraints(pattern=r"^[a-z]+(-[a-z]+\d+)?$")]
"""A region, `us-central1`, or a multi-region, `us`."""


class GcpCloud(Strict):
    """Google Cloud."""

    kind: Literal["gcp"]
    project: Project | None = Field(
        description="Project ID. null: GOOGLE_CLOUD_PROJECT, or gcloud's active configuration."
    )
    apis: tuple[Service, ...] = Field(description="APIs to enable. Slipway never disables them.")
    service_account: Account = Field(
        description="Service account of the workers: an account ID (created on first use), `default` (the project's "
        "Compute account) or a full address. Slipway grants roles only to an account that it created."
    )
    roles: tuple[Role, ...] = Field(description="Roles granted to service_account in the project.")
    bucket_roles: tuple[Role, ...] = Field(description="Roles granted to service_account on the bucket only.")
    bucket: str | None = Field(description="Bucket for code, assets and runs. null: <project>-slipway-<location>.")
    bucket_location: Location | None = Field(
        description="Region or multi-region of a new bucket. null: the region of tpu.zone."
    )
    soft_delete_days: int = Field(
        ge=0, le=90, description="Days that a new bucket keeps, and bills, deleted objects: 0, or 7 to 90."
    )
    noncurrent_days: int = Field(ge=1, description="Days before a new bucket deletes replaced versions.")
    unfinished_upload_days: int = Field(ge=1, description="Days before it deletes unfinished uploads.")
    ssh_source_ranges: tuple[Cidr, ...] = Field(description="IP ranges allowed to reach port 22 of a worker.")
    driver_service_account: Account = Field(
        description="The bastion's service account, in the form of service_account. Use a different account."
    )
    driver_roles: tuple[Role, ...] = Field(
        description="Roles granted to driver_service_account in the project. It also gets bucket_roles on the bucket, "
        "iam.serviceAccountUser on the workers' account and compute.instanceAdmin.v1 on the bastion."
    )
    driver_machine: str | None = Field(
        pattern=r"^[a-z][-a-z0-9]*$", description="Machine type of the bastion. null: a small one that tpu.zone has."
    )
    health_check: bool = Field(
        description="Check the chips once per boot of the pod, before the launch: a matrix product, the memory and an "
        "all-reduce. Skipped where the program's Python has no JAX."
    )
    trc: Trc | None = Field(description="Grant of free TPUs. null: none.")
    billing_budget: BillingBudget | None = Field(description="Budget on the billing account. null: none.")


class LocalCloud(GcpCloud):
    """The emulated cloud on this machine."""

    kind: Literal["local"]  # pyright: ignore[reportIncompatibleVariableOverride]
    port: int = Field(ge=0, le=65535, description="TCP port of the emulated cloud. 0: any free port.")
    operation_seconds: float = Field(
        ge=0,
        description="Pace of what takes time: 30 is Google's, 0.1 a three-hundredth; 0: no delays, no limits on rates.",
    )
    caller_roles: tuple[Role, ...] = Field(
        description="Your own roles in the emulated project, e.g. [roles/editor], to see what they allow."
    )
    realism: Literal["strict", "relaxed"] = Field(
        description="strict: permissions are judged, and changes of IAM take effect late, as on Google Cloud. relaxed: "
        "neither, for use with other tools."
    )
    quotas: dict[str, Annotated[int, Field(ge=0)]] = Field(
        description="Quotas of the emulated project, e.g. {INSTANCES: 24, tpu-v5s-litepod-serving: 4}; docs/"
        "emulated-cloud.md lists them."
    )
    faults: tuple[dict[str, Any], ...] = Field(description="Faults, e.g. {kind: preempted, after_seconds: 20}.")


class HereCloud(GcpCloud):
    """The machine that Slipway runs on: no pod, no network, no SSH. Of Google's keys it uses none."""

    kind: Literal["here"]  # pyright: ignore[reportIncompatibleVariableOverride]
    backend: Literal["auto", "cpu", "gpu", "tpu"] = Field(
        description="JAX's backend. auto: tpu or gpu if this machine has such devices (or as JAX_PLATFORMS says), else "
        "cpu."
    )
    devices: int | tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        description="Devices that a run uses: a number, or a list of indices such as [0, 2]. null: all; on cpu, 1. On "
        "cpu they are virtual devices."
    )
    python: Literal["current", "env"] = Field(
        description="current: the Python that runs Slipway, with its packages. env: a venv as `env` says."
    )
    folder: Annotated[str, StringConstraints(pattern=r"^[/~]"), AfterValidator(check_home)] | None = Field(
        description="Folder for records, code, assets and results. null: here/ in run.state_dir."
    )
    results: str | None = Field(
        pattern=r"^gs://[^/]+", description="gs:// URL for checkpoints and results of programs. null: `folder`."
    )

    @field_validator("devices")
    @classmethod
    def _name_some_devices(cls, value: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
        if value in (0, ()) or (isinstance(value, int) and value < 0):
            raise ValueError("a run needs at least one device")
        if isinstance(value, tuple) and len(set(value)) < len(value):
            raise ValueError("names a device twice")
        return value

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the devices; that of the first one while nobody has counted them."""
        return tuple(self.devices) if isinstance(self.devices, tuple) else tuple(range(self.devices or 1))

    @property
    def pod_name(self) -> str:
        """Name of these devices as a pod: `here-cpu-0`, `here-gpu-0to3`, `here-gpu-0-2`."""
        found = list(self.indices)
        whole = len(found) > 1 and found == list(range(found[0], found[0] + len(found)))
        return f"here-{self.backend}-{f'{found[0]}to{found[-1]}' if whole else '-'.join(map(str, found))}"


Cloud = Annotated[GcpCloud | LocalCloud | HereCloud, Field(discriminator="kind")]


TABLE_FILE = Path(conf.__file__).with_name("permissions.yaml")


@cache
def _table() -> dict[str, Any]:
    return read_table(TABLE_FILE)


def permissions_of_method(api: str, method: str) -> tuple[str, ...]:
    """Return what a method always needs, `tpu` and `projects.locations.nodes.get`. Raises KeyError for others."""
    return tuple(_table()["methods"][api][method])


def has_method(api: str, method: str) -> bool:
    """Return whether the table lists a method."""
    return method in _table()["methods"].get(api, {})


@cache
def all_permissions() -> frozenset[str]:
    """Return every permission of the table."""
    listed = {name for methods in _table()["methods"].values() for names in methods.values() for name in names}
    return frozenset(listed | set(_table()["others"]))


@cache
def permissions_of_role(role: str) -> frozenset[str]:
    """Return what a predefined role contains of `all_permissions`; nothing for a role that the table lacks."""
    held: set[str] = set()
    for pattern in _table()["roles"].get(role, ()):
        matching = {name for name in all_permissions() if fnmatchcase(name, pattern.removeprefix("-"))}
        held = held - matching if pattern.startswith("-") else held | matching
    return frozenset(held)


def predefined_roles() -> tuple[str, ...]:
    return tuple(_table()["roles"])

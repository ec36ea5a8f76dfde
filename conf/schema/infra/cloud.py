"""Whose cloud."""

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from conf.schema.base import Strict, Zone
from conf.schema.infra.network import Cidr

BillingAccount = Annotated[str, StringConstraints(pattern=r"^[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}$")]


class Budget(Strict):
    """Where a run ends, finished or not: the pod is deleted, the checkpoints stay."""

    max_usd: float | None = Field(gt=0, description="USD for all pods of the run at their price per hour; null: no end")
    max_hours: float | None = Field(gt=0, description="hours that all pods of the run may live; null: no end")
    usd_per_hour: float | None = Field(
        ge=0, description="what you pay for the whole slice per hour; null: the list price of conf/tpu_types.yaml"
    )


class Trc(Strict):
    """TPUs granted by the TPU Research Cloud: https://sites.research.google/trc. Only TPUs are free, and only there."""

    zones: tuple[Zone, ...] = Field(min_length=1, description="zones of the grant, from the mail")
    free_until: date = Field(description="last day of the grant, e.g. 2026-12-31")


class BillingBudget(Strict):
    """A budget on the billing account, which sends mail to its admins; it ends nothing."""

    account: BillingAccount = Field(description="id of the billing account, from `gcloud billing accounts list`")
    usd: int = Field(ge=1, description="USD per month")
    thresholds: tuple[float, ...] = Field(min_length=1, description="shares of it at which a mail is sent, e.g. 0.5")


Account = Annotated[
    str, StringConstraints(pattern=r"^([a-z]([-a-z0-9]{0,61}[a-z0-9])?|[a-z0-9-]+@[a-z0-9.-]+\.gserviceaccount\.com)$")
]
"""An account id of the project, `default`, or the full address of a service account."""
PROJECT = r"^([a-z0-9][a-z0-9.-]*:)?[a-z0-9][a-z0-9-]{0,62}$"
"""A project id, `my-project` or `example.com:my-project`: it becomes part of URLs and of folders of ours."""
Project = Annotated[str, StringConstraints(pattern=PROJECT)]
Service = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
Role = Annotated[str, StringConstraints(pattern=r"^(roles|projects/[^/\s]+/roles|organizations/\d+/roles)/[\w.]+$")]
Location = Annotated[str, StringConstraints(pattern=r"^[a-z]+(-[a-z]+\d+)?$")]
"""A region, `us-central1`, or a multi-region, `us`."""


class GcpCloud(Strict):
    """Google Cloud."""

    kind: Literal["gcp"]
    project: Project | None = Field(
        description="project id; null: GOOGLE_CLOUD_PROJECT or gcloud's active configuration"
    )
    apis: tuple[Service, ...] = Field(description="services to enable; never disabled again")
    service_account: Account = Field(
        description="whom the workers run as: an account id (created on first use), `default` (the project's Compute "
        "account) or a full address; roles are bound only to one that slipway made"
    )
    roles: tuple[Role, ...] = Field(description="roles of that account in the project")
    bucket_roles: tuple[Role, ...] = Field(description="roles of that account on the bucket alone")
    bucket: str | None = Field(description="bucket of code, assets and runs; null: <project>-slipway-<location>")
    bucket_location: Location | None = Field(
        description="region or multi-region of a bucket that is created; null: the region of tpu.zone"
    )
    soft_delete_days: int = Field(
        ge=0, le=90, description="days that a bucket of ours keeps, and bills, what was deleted; 0, or 7 to 90"
    )
    noncurrent_days: int = Field(ge=1, description="days after which a bucket of ours drops replaced versions")
    unfinished_upload_days: int = Field(ge=1, description="days after which it drops unfinished uploads")
    ssh_source_ranges: tuple[Cidr, ...] = Field(description="who may reach port 22 of a worker")
    driver_service_account: Account = Field(
        description="whom the bastion of recovery.driver=bastion runs as; as service_account, and best another one"
    )
    driver_roles: tuple[Role, ...] = Field(
        description="roles of that account in the project; on the bucket it has bucket_roles, on the workers' account "
        "iam.serviceAccountUser, on the bastion alone compute.instanceAdmin.v1"
    )
    driver_machine: str = Field(min_length=1, description="machine type of the bastion")
    trc: Trc | None = Field(description="a grant of free TPUs; null: none")
    billing_budget: BillingBudget | None = Field(description="a budget on the billing account; null: none")


class LocalCloud(GcpCloud):
    """The emulated cloud on loopback."""

    kind: Literal["local"]  # pyright: ignore[reportIncompatibleVariableOverride]
    port: int = Field(ge=0, le=65535, description="TCP port of the emulated cloud; 0: any free one")
    operation_seconds: float = Field(ge=0, description="seconds an emulated operation takes")
    faults: tuple[dict[str, Any], ...] = Field(
        description="scripted misfortune, e.g. {kind: preempted, after_seconds: 20}"
    )


Cloud = Annotated[GcpCloud | LocalCloud, Field(discriminator="kind")]

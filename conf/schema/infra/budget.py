"""What a run may cost, and what is free."""

from datetime import date
from typing import Annotated

from pydantic import Field, StringConstraints

from conf.schema.base import Strict, Zone

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

"""Hourly price of a pod, from dated list prices in `conf/tpu_types.yaml` and `conf/prices.yaml`. Never a bill."""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import conf
from conf.as_of import facts_of
from conf.schema.config import Config
from conf.schema.topology import TABLE_FILE, read_table

HOURS_PER_MONTH = 730.0
BASTION_DISK_GB = 10
"""Default boot disk size of an instance with Google's Debian image."""
SPOT_TIERS = frozenset({"spot", "preemptible"})


@dataclass(frozen=True)
class HourlyPrice:
    """USD per hour of one pod: TPUs (None: unknown), NAT and addresses. `source` says where the prices come from."""

    tpu: float | None
    network: float
    source: str
    network_items: str = "NAT and addresses"

    @property
    def total(self) -> float | None:
        return None if self.tpu is None else self.tpu + self.network

    def __str__(self) -> str:
        if self.tpu is None:
            return "unknown for this zone"
        beside = f", and ${self.network:.2f} for {self.network_items}" if self.network >= 0.005 else ""
        return f"${self.tpu:.2f} per hour ({self.source}){beside}"


@cache
def load_prices() -> dict[str, Any]:
    return read_table(Path(conf.__file__).with_name("prices.yaml"))


def hourly_price(config: Config, now: float, zone: str | None = None, capacity: str | None = None) -> HourlyPrice:
    """Return the price of the config's pod in a zone and a tier, by default the config's first ones.

    `now` is in seconds since the epoch; a TRC grant is free until a date.
    """
    zone = zone or config.tpu.zone
    capacity = capacity or config.tpu.capacity[0]
    given, trc = config.budget.usd_per_hour, config.cloud.trc
    if given is not None:
        return HourlyPrice(given, 0.0, "budget.usd_per_hour")
    if config.cloud.kind == "here":
        return HourlyPrice(None, 0.0, "this machine")
    if config.cloud.kind == "local":
        return HourlyPrice(None, 0.0, "the cloud is emulated on this machine")
    if trc is not None and zone in trc.zones and datetime.fromtimestamp(now, UTC).date() <= trc.free_until:
        return HourlyPrice(
            0.0, _network(config), f"free under the TRC grant until {trc.free_until}", _network_items(config)
        )
    tpu = config.topology.usd_per_hour(zone, spot=capacity in SPOT_TIERS)
    return HourlyPrice(tpu, _network(config), f"{_year_of_prices()} list price", _network_items(config))


@cache
def _year_of_prices() -> int:
    """Return the year of which most prices of TPUs are, by the file itself."""
    return next(facts.since.year for facts in facts_of(TABLE_FILE) if "prices" in facts.what)


def _network_items(config: Config) -> str:
    return "NAT, addresses and the bastion" if config.recovery.driver == "bastion" else "NAT and addresses"


def _network(config: Config) -> float:
    """Return the price of NAT, the workers' external addresses and the bastion, without traffic."""
    table, workers = load_prices(), config.topology.workers
    bastion = 0.0
    if config.recovery.driver == "bastion":
        disk = BASTION_DISK_GB * table["disk"]["usd_per_gb_month"]["pd-standard"] / HOURS_PER_MONTH
        bastion = table["vm"]["usd_per_hour"].get(config.bastion_machine, 0.0) + disk
    if config.external_ip:
        return bastion + workers * table["external_ip"]["usd_per_hour"]
    if not config.network.nat:
        return bastion
    nat = table["nat"]
    return (
        bastion
        + min(workers * nat["usd_per_vm_hour"], nat["usd_per_hour_at_most"])
        + table["external_ip"]["usd_per_hour"]
    )


def max_cost(config: Config, hourly: HourlyPrice) -> str:
    """Describe the most that the run can cost, which only a limit can say."""
    budget = config.budget
    limits = [(f"${budget.max_usd:.2f}", "budget.max_usd")] if budget.max_usd is not None else []
    if budget.max_hours is not None:
        usd = f"${budget.max_hours * hourly.total:.2f} in " if hourly.total is not None else ""
        limits.append((f"{usd}{budget.max_hours:g} h", "budget.max_hours"))
    if limits:
        return (
            f"at most {' and '.join(f'{what} ({key})' for what, key in limits)}; then the run ends and the pod is "
            "deleted"
        )
    return "none: billed until the program ends; set budget.max_hours or budget.max_usd"


def monthly_storage_price(gigabytes: float) -> float:
    """Return the price in USD per month of data stored in a bucket."""
    return gigabytes * load_prices()["storage"]["usd_per_gb_month"]

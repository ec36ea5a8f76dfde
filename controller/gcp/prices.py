"""What an hour of a pod costs. List prices with a date, never a bill: `conf/tpu_types.yaml` and `conf/prices.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import conf
from conf.schema.config import Config

HOURS_PER_MONTH = 730.0
BASTION_DISK_GB = 10
"""What Google gives an instance of its Debian image where nothing else is said."""
SPOT_TIERS = frozenset({"spot", "preemptible"})


@dataclass(frozen=True)
class HourlyPrice:
    """USD per hour of one pod: its TPUs (None: not known), and the NAT and addresses beside them; `source` in words."""

    tpu: float | None
    network: float
    source: str
    beside: str = "NAT and addresses"

    @property
    def total(self) -> float | None:
        return None if self.tpu is None else self.tpu + self.network

    def __str__(self) -> str:
        if self.tpu is None:
            return "not known for this zone"
        beside = f", and ${self.network:.2f} for {self.beside}" if self.network >= 0.005 else ""
        return f"${self.tpu:.2f} per hour ({self.source}){beside}"


@cache
def load_prices() -> dict[str, Any]:
    """The parsed `conf/prices.yaml`."""
    return yaml.safe_load(Path(conf.__file__).with_name("prices.yaml").read_text())


def hourly_price(config: Config, now: float, zone: str | None = None, capacity: str | None = None) -> HourlyPrice:
    """What the config's pod costs in a zone, by default its first, in a tier, by default its first.

    Args:
        now: seconds since the epoch; a TRC grant is free until a date.
    """
    zone = zone or config.tpu.zone
    capacity = capacity or config.tpu.capacity[0]
    given, trc = config.budget.usd_per_hour, config.cloud.trc
    if given is not None:
        return HourlyPrice(given, 0.0, "budget.usd_per_hour")
    if config.cloud.kind == "local":
        return HourlyPrice(None, 0.0, "the cloud is emulated on this machine")
    if trc is not None and zone in trc.zones and datetime.fromtimestamp(now, UTC).date() <= trc.free_until:
        return HourlyPrice(
            0.0, _network(config), f"free under the TRC grant until {trc.free_until}", _network_items(config)
        )
    tpu = config.topology.usd_per_hour(zone, spot=capacity in SPOT_TIERS)
    return HourlyPrice(tpu, _network(config), "list price of 2026", _network_items(config))


def _network_items(config: Config) -> str:
    return "NAT, addresses and the bastion" if config.recovery.driver == "bastion" else "NAT and addresses"


def _network(config: Config) -> float:
    """NAT and external addresses of the workers, and the bastion; traffic not counted."""
    table, workers = load_prices(), config.topology.workers
    bastion = 0.0
    if config.recovery.driver == "bastion":
        disk = BASTION_DISK_GB * table["disk"]["usd_per_gb_month"]["pd-standard"] / HOURS_PER_MONTH
        bastion = table["vm"]["usd_per_hour"].get(config.cloud.driver_machine, 0.0) + disk
    if config.tpu.external_ip:
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
    """What the run can cost at most, in words; what it will cost, nobody knows before its first steps are timed."""
    budget = config.budget
    limits = [(f"${budget.max_usd:.2f}", "budget.max_usd")] if budget.max_usd is not None else []
    if budget.max_hours is not None:
        usd = f"${budget.max_hours * hourly.total:.2f} in " if hourly.total is not None else ""
        limits.append((f"{usd}{budget.max_hours:g} h", "budget.max_hours"))
    if limits:
        return (
            f"at most {' and '.join(f'{what} ({key})' for what, key in limits)}, then it is ended and the pod deleted"
        )
    return "no limit: how long its steps take is not known before they run; budget.max_hours or budget.max_usd sets one"


def monthly_storage_price(gigabytes: float) -> float:
    """USD per month for data that lies in a bucket."""
    return gigabytes * load_prices()["storage"]["usd_per_gb_month"]

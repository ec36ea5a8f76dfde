"""Who fetches or builds an asset, how long that takes and what it costs, as far as it is known before."""

from typing import Literal

from conf.schema.config import Config
from controller.gcp.prices import HOURS_PER_MONTH, hourly_price, load_prices
from controller.inputs.assets import ResolvedAsset
from controller.plan.workers import fetched_nearby, fetched_on_pod
from controller.progress import format_size
from controller.resources.uploads.fetch_vm import (
    BUILD_SETUP_SECONDS,
    BYTES_PER_SECOND,
    SYSTEM_GB,
    fetch_machine,
    fetch_seconds,
)
from controller.resources.uploads.nearby import LARGE_BYTES

LAPTOP_BYTES_PER_SECOND = 12.5e6
"""Of an office's 100 Mbit/s, down and up at once; assumed."""
GB = 1e9


def fetcher_of(config: Config, asset: ResolvedAsset, size: int) -> Literal["laptop", "vm", "pod"]:
    """Return who fetches an asset of so many bytes."""
    if fetched_on_pod(config, asset):
        return "pod"
    large = config.assets.fetch_on_of(asset.kind, asset.name) == "vm" or size >= LARGE_BYTES
    return "vm" if large and fetched_nearby(config, asset) else "laptop"


def describe_fetch(config: Config, asset: ResolvedAsset, size: int, now: float) -> str:
    """Return who fetches an asset, about how many minutes that takes, and for how many dollars; `now` as for prices."""
    fetcher, table = fetcher_of(config, asset, size), load_prices()
    traffic = size / GB * table["nat"]["usd_per_gb"] if config.network.nat and not config.external_ip else 0.0
    if fetcher == "laptop":
        seconds = size / LAPTOP_BYTES_PER_SECOND
        return f"through this machine, about {_minutes(seconds)} at 100 Mbit/s"
    if fetcher == "pod":
        seconds = size / BYTES_PER_SECOND
        who, per_hour = "by worker 0 of the pod", hourly_price(config, now).total
    else:
        seconds, machine = fetch_seconds(size), fetch_machine(config)
        disk = SYSTEM_GB * table["disk"]["usd_per_gb_month"]["pd-balanced"] / HOURS_PER_MONTH
        who, per_hour = f"by an {machine} in {config.tpu.zone}", table["vm"]["usd_per_hour"][machine] + disk
    words = f"{who}, about {_minutes(seconds)}"
    if config.cloud.kind == "local" or per_hour is None:
        return words
    nat = f", of which ${traffic:.2f} for NAT" if traffic >= 0.005 else ""
    return f"{words} and ${seconds / 3600 * per_hour + traffic:.2f}{nat}"


def describe_build(config: Config, asset: ResolvedAsset, size: int, why_here: str, now: float) -> str:
    """Return who builds an asset that reads so many bytes of the Hub; `why_here` is why it has to be this machine."""
    fetcher, recipe = "laptop" if why_here else fetcher_of(config, asset, size), asset.recipe
    assert recipe, "only builds have a recipe"
    wanted = config.assets.fetch_on_of(asset.kind, asset.name)
    if fetcher == "laptop":
        if wanted == "laptop":
            return "built on this machine, as fetch_on says"
        if config.cloud.kind == "here" or (config.tpu.adopt and wanted != "pod"):
            return "built on this machine: there is no network for a VM"
        known = (
            f"it reads {format_size(size)} of the Hub, less than 1 GB"
            if size
            else "its command names nothing of the Hub"
        )
        return f"built on this machine: {why_here or recipe.vm_bound or known}"
    if fetcher == "pod":
        who, per_hour = "worker 0 of the pod", hourly_price(config, now).total
    else:
        machine = fetch_machine(config)
        who, per_hour = f"an {machine} in {config.tpu.zone}", load_prices()["vm"]["usd_per_hour"][machine]
    reads = f"; it reads {format_size(size)} of the Hub" if size else ""
    setup = f", after about {_minutes(BUILD_SETUP_SECONDS)} for its packages" if fetcher == "vm" else ""
    price = "" if config.cloud.kind == "local" or per_hour is None else f", ${per_hour:.2f} per hour until it is done"
    return f"built on {who}{setup}{price}{reads}"


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min"

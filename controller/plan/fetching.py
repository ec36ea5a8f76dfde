"""Who fetches or builds an asset, how long that takes and what it costs, as far as it is known before.

A build can run near the bucket if it needs nothing of this machine but the shipped code.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from conf.schema.config import Config
from conf.schema.infra.assets import HUB
from controller.gcp.prices import HOURS_PER_MONTH, hourly_price, load_prices
from controller.inputs.assets import BuildRecipe, ResolvedAsset, files_below, path_exists
from controller.inputs.code import CodeSnapshot, UnfetchedSnapshot
from controller.inputs.requirements import Requirements
from controller.progress import format_size
from controller.resources.uploads.errands import OWN
from controller.resources.uploads.nearby import (
    BUILD_SETUP_SECONDS,
    BYTES_PER_SECOND,
    LARGE_BYTES,
    SYSTEM_GB,
    fetch_machine,
    fetch_seconds,
)

OUTSIDE = re.compile(r"(?:^|[\s\"'=])(~[^\s\"':;]*|\.\./[^\s\"':;]*|/(?!dev/|usr/|bin/|tmp/|proc/)[^\s\"':;]+)")
"""A path of this machine in a word, which may be a script for a shell."""
MODULES = "trainer."


def with_bounds(config: Config, asset: ResolvedAsset, code: CodeSnapshot, requirements: Requirements) -> ResolvedAsset:
    """Return the asset with what binds its build to a machine."""
    recipe = asset.recipe
    if recipe is None:
        return asset
    vm_bound = ""
    if config.env.packages == "image" and config.cloud.kind != "local":
        vm_bound = "env.packages=image is about the image of TPU VMs"
    elif requirements.git:
        vm_bound = "env.requirements names git repositories, which are built for the pod"
    bound = next(_bounds(config, recipe, code), "")
    return replace(asset, recipe=replace(recipe, bound=bound, vm_bound=bound or vm_bound))


def _bounds(config: Config, recipe: BuildRecipe, code: CodeSnapshot) -> Iterator[str]:
    """Yield why a build can run on this machine only."""
    if recipe.argv[0] == OWN:
        if not recipe.argv[1:2] or not recipe.argv[1].startswith(MODULES):
            yield f"`{' '.join(recipe.argv[:2])}` is a verb of this machine"
        elif config.program.kind != "trainer":
            yield f"{recipe.argv[1]} is not in the code that program=command ships"
    for word in (*recipe.argv, *recipe.inputs):
        if found := OUTSIDE.search(word):
            yield f"it names {found[1]}, a path of this machine"
    if isinstance(code, UnfetchedSnapshot):
        return
    named = [
        word for word in dict.fromkeys((*recipe.argv[1:], *recipe.inputs)) if word and not Path(word).is_absolute()
    ]
    for word in named:
        path = recipe.root / word
        if path_exists(path) and path.resolve() != recipe.root.resolve():
            shipped = {file.resolve() for file in code.paths.values()}
            left = next((file for file in files_below(path) if file.resolve() not in shipped), None)
            if left is not None:
                yield f"it reads {left.relative_to(recipe.root)}, which is not among the shipped files"


LAPTOP_BYTES_PER_SECOND = 12.5e6
"""Of an office's 100 Mbit/s, down and up at once; assumed."""
GB = 1e9


def fetched_nearby(config: Config, asset: ResolvedAsset) -> bool:
    """Return whether a VM may fetch or build the asset, in a network that Slipway creates."""
    wanted = config.assets.fetch_on_of(asset.kind, asset.name)
    if config.cloud.kind == "here" or config.tpu.adopt or wanted not in ("auto", "vm"):
        return False
    if asset.recipe is not None:
        return not asset.recipe.vm_bound and (wanted == "vm" or bool(asset.recipe.sources))
    return _is_on_the_net(asset)


def fetched_on_pod(config: Config, asset: ResolvedAsset) -> bool:
    """Return whether the pod fetches or builds the asset; local files are sent from this machine."""
    if config.assets.fetch_on_of(asset.kind, asset.name) != "pod":
        return False
    return not asset.recipe.bound if asset.recipe is not None else _is_on_the_net(asset)


def _is_on_the_net(asset: ResolvedAsset) -> bool:
    return (asset.source or "").startswith(HUB) or any(file.url for file in asset.files)


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

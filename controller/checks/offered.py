"""Does Google offer the type and the image in the zones? Its own lists decide; the table may be behind them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from conf.schema.config import Config
from controller.core.finding import Finding

if TYPE_CHECKING:
    from controller.context import Context


def offered_types(config: Config, world: Context) -> Iterator[Finding]:
    """`acceleratorTypes.list` of a zone is what can be made there, whatever any table says."""
    for zone in () if config.tpu.adopt else config.tpu.all_zones:
        listed = _listed(world, zone, "acceleratorTypes")
        wanted = config.tpu.accelerator_type
        if lacking(wanted, listed):
            words = f"Google offers no {wanted} in {zone}; nearest there: {nearest(wanted, listed)}"
            yield Finding("type_offered", "error", _key(config, zone), words)


def offered_runtimes(config: Config, world: Context) -> Iterator[Finding]:
    """An image that `runtimeVersions.list` does not name is refused, minutes later."""
    wanted = config.tpu.runtime_version or config.topology.runtime_version
    for zone in () if config.tpu.adopt else config.tpu.all_zones:
        listed = _listed(world, zone, "runtimeVersions")
        if lacking(wanted, listed):
            words = f"Google offers no image {wanted} in {zone}; nearest there: {nearest(wanted, listed)}"
            yield Finding("runtime_offered", "error", "tpu.runtime_version", words)


def lacking(wanted: str, listed: Set[str]) -> bool:
    """Is it certain that something is not offered? An empty list says nothing."""
    return bool(listed) and wanted not in listed


def nearest(wanted: str, listed: Set[str]) -> str:
    """The names most like the wanted one."""
    return ", ".join(difflib.get_close_matches(wanted, sorted(listed), n=4, cutoff=0.3) or sorted(listed)[:4])


def _listed(world: Context, zone: str, collection: str) -> Set[str]:
    parent = f"projects/{world.project}/locations/{zone}"
    found = world.google.pages("tpu", f"projects.locations.{collection}.list", collection, parent=parent)
    return frozenset(item["name"].rpartition("/")[2] for item in found)


def _key(config: Config, zone: str) -> str:
    return "tpu.zone" if zone == config.tpu.zone else "tpu.fallback_zones"


PROBES = (
    offered_types,
    offered_runtimes,
)

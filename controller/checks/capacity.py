"""Capacity: the slice can be created in its zones with its image, network and bucket."""

import re
from collections.abc import Iterator, Set

from conf.schema.config import Config
from conf.schema.infra.regions import is_near, subnet_range
from conf.schema.infra.topology import tpu_type_table, zone_region
from controller.context import Context
from controller.core.finding import Issue, check
from controller.core.text import nearest_names

IMAGES = {
    "v2, v3, v4": r"^v2-alpha$|^tpu-vm-",
    "v4": r"tpu-?v4",
    "v5e": r"tpuv5-?lite|v5e",
    "v5p": r"tpuv5$|tpuv5p|v5p",
    "v6e": r"v6e",
    "tpu7x": r"tpu7",
}
"""The generations that an image is made for, by a pattern of its name: https://cloud.google.com/tpu/docs/runtimes."""


@check("zone", "error", "tpu.zone", "tpu.fallback_zones", also="warning")
def zone_has_type(config: Config) -> Iterator[Issue]:
    """Each generation is available in some zones only. A zone that the table may be too old to list is a warning."""
    topology = config.topology
    zones = ", ".join(topology.zones)
    for zone in config.tpu.all_zones if topology.zones else ():
        if zone in topology.zones:
            continue
        certain = config.cloud.kind == "local" or not (is_known_zone(zone) or subnet_range(zone_region(zone)))
        message = f"{zone} has no {topology.generation}; zones that have it: {zones}"
        yield Issue(message, _zone_key(config, zone), "error" if certain else "warning")


@check("obtainable", "error", "tpu.accelerator_type")
def type_is_obtainable(config: Config) -> Iterator[Issue]:
    """Google offers new generations only through Compute Engine."""
    if config.topology.generation == "tpu7x":
        yield Issue("tpu7x needs Compute Engine, which slipway does not support yet; choose v6e, v5p, v5e or v4")


@check("runtime", "warning", "tpu.runtime_version", also="error")
def runtime_matches_type(config: Config) -> Iterator[Issue]:
    """A slice boots with another generation's image, but JAX finds no TPU on it. An image that is certainly wrong is an
    error: one named after another generation, or `v2-alpha`, which is older than v5e.
    """
    documented, wanted, generation = (
        config.topology.runtime_version,
        config.tpu.runtime_version,
        config.topology.generation,
    )
    if wanted in (None, documented):
        return
    made_for = next((name for name, pattern in IMAGES.items() if re.search(pattern, wanted)), None)
    if made_for not in (None, generation) and generation not in (made_for or "").split(", "):
        yield Issue(
            f"{wanted} is an image for {made_for}, not for {generation}; use {documented}, or null", "", "error"
        )
    else:
        yield Issue(f"{wanted} is not the documented image for {generation}; use {documented}, or null")


@check("tier", "error", "tpu.provisioner", "tpu.capacity")
def tier_has_a_provisioner(config: Config) -> Iterator[Issue]:
    """Some tiers need a queued resource and some a node."""
    tpu = config.tpu
    if "flex_start" in tpu.capacity and tpu.provisioner == "node":
        yield Issue("flex_start needs a queued resource; set it to auto or queued")
    if "preemptible" in tpu.capacity and tpu.provisioner == "queued":
        message = "queued resources do not support preemptible, which ends after 24 h; choose spot"
        yield Issue(message, "tpu.capacity")


@check("reservation", "error", "tpu.reservation")
def reservation_is_named(config: Config) -> Iterator[Issue]:
    """A queued resource needs the name of the reservation for reserved capacity."""
    tpu = config.tpu
    if "reserved" in tpu.capacity and tpu.reservation is None and tpu.is_queued("reserved"):
        yield Issue("tpu.capacity=reserved needs the name of the reservation")


@check("adopt", "error", "tpu.name", "tpu.data_disk_gb")
def adopted_has_a_name(config: Config) -> Iterator[Issue]:
    """An adopted pod is found by name and never changed."""
    if config.tpu.adopt and config.tpu.name is None:
        yield Issue("tpu.adopt=true needs the name of the existing pod")
    if config.tpu.adopt and config.tpu.data_disk_gb is not None:
        yield Issue("an adopted pod cannot get a disk; set it to null", "tpu.data_disk_gb")


@check("data_disk", "error", "tpu.data_disk_gb")
def disk_is_writable(config: Config) -> Iterator[Issue]:
    """Several VMs can share a disk only read-only: https://cloud.google.com/tpu/docs/setup-persistent-disk."""
    if config.tpu.data_disk_gb is not None and config.topology.workers > 1:
        yield Issue(
            f"a writable disk attaches to one VM only, and {config.tpu.accelerator_type} has "
            f"{config.topology.workers}; set it to null and write to the bucket"
        )


@check("subnet_range", "error", "network.cidr")
def subnet_has_a_range(config: Config) -> Iterator[Issue]:
    """A new subnet needs an IP range; conf/regions.yaml has one for each region it lists."""
    unknown = [region for region in config.regions if subnet_range(region) is None]
    if unknown and config.network.cidr is None and config.network.mode == "custom":
        yield Issue(f"conf/regions.yaml has no range for {', '.join(unknown)}; set one, e.g. 10.80.0.0/20")


@check("subnet_overlap", "error", "network.cidr")
def ranges_do_not_overlap(config: Config) -> Iterator[Issue]:
    """Google rejects two subnets with the same range in one network."""
    if config.network.cidr is not None and len(config.regions) > 1:
        yield Issue(
            f"one range cannot serve the zones' {len(config.regions)} regions; use null, so that each gets its own"
        )


@check("bucket_near", "error", "cloud.bucket_location")
def bucket_is_near(config: Config) -> Iterator[Issue]:
    """Reads across regions are slow and billed, so a new bucket must serve every zone."""
    if config.cloud.bucket is not None:
        return  # only Google knows its location; `bucket_far` checks it
    location = config.cloud.bucket_location or config.region
    if far := [region for region in config.regions if not is_near(location, region)]:
        yield Issue(
            f"{location} does not serve {', '.join(far)}; set it to a multi-region (us, eu, asia) or drop those zones"
        )


@check("soft_delete_days", "error", "cloud.soft_delete_days")
def soft_delete_is_possible(config: Config) -> Iterator[Issue]:
    """Soft delete is off or lasts at least a week: https://cloud.google.com/storage/docs/soft-delete."""
    if 0 < config.cloud.soft_delete_days < 7:
        yield Issue("must be 0 or 7 to 90")


@check("type_offered", "error", "tpu.zone", "tpu.fallback_zones", live=True)
def offered_types(config: Config, context: Context) -> Iterator[Issue]:
    """Google's `acceleratorTypes.list` is authoritative for a zone; the table may be out of date."""
    for zone in () if config.tpu.adopt else config.tpu.all_zones:
        listed = _listed(context, zone, "acceleratorTypes")
        wanted = config.tpu.accelerator_type
        if is_certainly_missing(wanted, listed):
            message = f"Google offers no {wanted} in {zone}; closest there: {nearest_names(wanted, listed)}"
            yield Issue(message, _zone_key(config, zone))


@check("runtime_offered", "error", "tpu.runtime_version", also="note", live=True)
def offered_runtimes(config: Config, context: Context) -> Iterator[Issue]:
    """Google rejects a mistyped image, but only after minutes. A documented image that its list lacks is only noted."""
    documented = config.topology.runtime_version
    wanted = config.tpu.runtime_version or documented
    for zone in () if config.tpu.adopt else config.tpu.all_zones:
        listed = _listed(context, zone, "runtimeVersions")
        if not is_certainly_missing(wanted, listed):
            continue
        if wanted == documented:
            yield Issue(f"Google's list for {zone} lacks {wanted}, the documented image", severity="note")
        else:
            yield Issue(f"Google offers no image {wanted} in {zone}; closest there: {nearest_names(wanted, listed)}")


def is_known_zone(zone: str) -> bool:
    """Return whether the table lists the zone for any TPU generation."""
    return any(zone in generation["zones"] for generation in tpu_type_table()["generations"].values())


def is_certainly_missing(wanted: str, listed: Set[str]) -> bool:
    """Return whether a nonempty list lacks the name. An empty list proves nothing."""
    return bool(listed) and wanted not in listed


def _listed(context: Context, zone: str, collection: str) -> Set[str]:
    parent = f"projects/{context.project}/locations/{zone}"
    found = context.google.list_all("tpu", f"projects.locations.{collection}.list", collection, parent=parent)
    return frozenset(item["name"].rpartition("/")[2] for item in found)


def _zone_key(config: Config, zone: str) -> str:
    return "tpu.zone" if zone == config.tpu.zone else "tpu.fallback_zones"

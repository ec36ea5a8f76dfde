"""Capacity: the slice can be created in its zones with its image, network and bucket."""

import re
from collections.abc import Iterator, Set

from conf.schema.config import Config
from conf.schema.infra.regions import is_near, subnet_range
from conf.schema.infra.topology import tpu_type_table, zone_region
from controller.context import Context
from controller.core.finding import Issue, check
from controller.core.text import nearest_names
from controller.gcp.errors import NotFoundError
from controller.resources.pod.provisioner import MAX_RUN_MARGIN_SECONDS, max_run_seconds

FLEX_SECONDS = 7 * 24 * 3600
"""Longest life of a flex-start pod: https://cloud.google.com/compute/docs/instances/about-flex-start-vms."""
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
    """Google's TPU API lacks new generations, and Compute Engine lacks old ones."""
    topology, tpu = config.topology, config.tpu
    generations = tpu_type_table()["generations"]
    if not tpu.on_compute_engine and not topology.on_tpu_api:
        message = f"the TPU API has no {topology.generation}; set it to auto or compute_engine"
        yield Issue(message, "tpu.plane")
    if tpu.on_compute_engine and not topology.image_family:
        others = ", ".join(name for name, facts in generations.items() if "image_family" in facts)
        message = f"Compute Engine has no {topology.generation}; set it to auto or tpu_api, or choose {others}"
        yield Issue(message, "tpu.plane")
    elif tpu.on_compute_engine and not topology.machine_type:
        machines = ", ".join(generations[topology.generation]["machine_types"].values())
        yield Issue(f"Compute Engine has no VM type for {tpu.accelerator_type}; it has {machines}")


@check("plane_keys", "error", "tpu.provisioner", "tpu.capacity", "tpu.machine_type", "tpu.max_run_hours")
def keys_are_of_the_plane(config: Config) -> Iterator[Issue]:
    """Some keys and tiers exist on one plane only. Google ends every flex-start pod after seven days."""
    tpu = config.tpu
    if not tpu.on_compute_engine:
        if tpu.machine_type is not None:
            yield Issue("the TPU API chooses the VMs; set it to null, or tpu.plane=compute_engine", "tpu.machine_type")
        if tpu.max_run_hours is not None:
            message = "only Compute Engine ends a pod by itself; set it to null and budget.max_hours, or tpu.plane"
            yield Issue(f"{message} to compute_engine", "tpu.max_run_hours")
        return
    if tpu.provisioner != "auto":
        yield Issue(f"{tpu.provisioner} is a way of the TPU API; set it to auto, or tpu.plane to tpu_api")
    if "preemptible" in tpu.capacity:
        yield Issue("Compute Engine has no preemptible TPUs; choose spot", "tpu.capacity")
    seconds = max_run_seconds(config)
    if "flex_start" in tpu.capacity and not seconds:
        message = "flex_start needs a duration: set it to at most 168, or set budget.max_hours"
        yield Issue(message, "tpu.max_run_hours")
    elif "flex_start" in tpu.capacity and seconds and seconds > FLEX_SECONDS + MAX_RUN_MARGIN_SECONDS:
        yield Issue(
            f"Google ends a flex_start pod after 168 hours, and this is {seconds / 3600:.0f}; set it to at most 168",
            "tpu.max_run_hours",
        )


@check("runtime", "warning", "tpu.runtime_version", also="error")
def runtime_matches_type(config: Config) -> Iterator[Issue]:
    """A slice boots with another generation's image, but JAX finds no TPU on it. An image that is certainly wrong is an
    error: one named after another generation, or `v2-alpha`, which is older than v5e. Compute Engine has images of its
    own.
    """
    if config.tpu.on_compute_engine:
        yield from _image_matches_type(config)
        return
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


def _image_matches_type(config: Config) -> Iterator[Issue]:
    """Yield an image of the TPU API, and one that Google does not document for the generation."""
    wanted, documented = config.tpu.runtime_version, config.topology.image_family
    if wanted in (None, documented):
        return
    if any(wanted == facts["runtime_version"] for facts in tpu_type_table()["generations"].values()):
        yield Issue(f"{wanted} is an image of the TPU API; on Compute Engine use {documented}, or null", "", "error")
    else:
        yield Issue(f"{wanted} is not the documented image for {config.topology.generation}; use {documented}, or null")


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
    """A queued resource, and Compute Engine, need the name of the reservation for reserved capacity."""
    tpu = config.tpu
    named = tpu.on_compute_engine or tpu.is_queued("reserved")
    if "reserved" in tpu.capacity and tpu.reservation is None and named:
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
    """Google's `acceleratorTypes.list`, or `machineTypes.get`, is authoritative for a zone; the table may be out of
    date.
    """
    if config.tpu.on_compute_engine:
        yield from _offered_machines(config, context)
        return
    for zone in () if config.tpu.adopt else config.tpu.all_zones:
        listed = _listed(context, zone, "acceleratorTypes")
        wanted = config.tpu.accelerator_type
        if is_certainly_missing(wanted, listed):
            message = f"Google offers no {wanted} in {zone}; closest there: {nearest_names(wanted, listed)}"
            yield Issue(message, _zone_key(config, zone))


@check("runtime_offered", "error", "tpu.runtime_version", also="note", live=True)
def offered_runtimes(config: Config, context: Context) -> Iterator[Issue]:
    """Google rejects a mistyped image, but only after minutes. A documented image that its list lacks is only noted."""
    if config.tpu.on_compute_engine:
        return  # Google rejects a mistyped one at once
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


def _offered_machines(config: Config, context: Context) -> Iterator[Issue]:
    wanted = config.topology.machine_type
    for zone in () if config.tpu.adopt else config.tpu.all_zones:
        try:
            context.google.call("compute", "machineTypes.get", project=context.project, zone=zone, machineType=wanted)
        except NotFoundError:
            message = f"Compute Engine offers no {wanted} in {zone}; choose another zone, or set tpu.plane"
            yield Issue(message, _zone_key(config, zone))


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

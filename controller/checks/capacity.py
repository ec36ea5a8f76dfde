"""Budget and capacity: limits can be enforced, and the slice can be created with its image, network and bucket.

TPUs that should be free are free.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from difflib import get_close_matches

from conf.schema.config import Config
from conf.schema.topology import is_near, subnet_range, tpu_type_table
from controller.context import Context
from controller.core.finding import Issue, check
from controller.gcp.prices import SPOT_TIERS
from controller.plan.samplers import sampler_config
from controller.resources.pod.planes import ask_planes, plane_choices, planes_for
from controller.resources.pod.refusals import zone_key


@check("price", "error", "budget.max_usd")
def price_is_known(config: Config) -> Iterator[Issue]:
    """A limit in dollars needs a known hourly price."""
    budget = config.budget
    if budget.max_usd is not None and budget.usd_per_hour == 0 and config.cloud.trc is None:
        yield Issue("is never reached: budget.usd_per_hour is 0; set what an hour costs, or use budget.max_hours")
    if budget.max_usd is None or budget.usd_per_hour is not None or config.cloud.trc is not None:
        return
    spot = config.tpu.capacity[0] in SPOT_TIERS
    free = {"local": "the emulated cloud is free", "here": "this machine is free"}.get(config.cloud.kind)
    if free or config.topology.usd_per_hour(config.tpu.zone, spot=spot) is None:
        what = free or "the zone's price is unknown"
        yield Issue(f"cannot be enforced: {what}; set budget.usd_per_hour, or use budget.max_hours")


SHORTEST_HOURS = 0.1
"""A pod takes minutes to be there; a run that may take less can hardly begin."""
MIN_SILENCE = 60
"""Seconds in which imports, the chips and a first compilation hardly get ready."""


@check("too_short", "warning", "budget.max_hours", "budget.max_usd", "recovery.hang_timeout_seconds", of_pods=True)
def limits_leave_time_to_begin(config: Config) -> Iterator[Issue]:
    """A pod would be billed, and nothing done."""
    budget, spot = config.budget, config.tpu.capacity[0] in SPOT_TIERS
    if config.cloud.kind != "gcp":
        return
    listed = None if config.cloud.trc is not None else config.topology.usd_per_hour(config.tpu.zone, spot=spot)
    price = budget.usd_per_hour or listed
    limits = {"max_hours": budget.max_hours, "max_usd": budget.max_usd and price and budget.max_usd / price}
    for key, hours in limits.items():
        if hours and hours < SHORTEST_HOURS:
            told = f"the run ends {3600 * hours:.0f} seconds after its pod is there, before most programs have begun"
            yield Issue(told, f"budget.{key}")
    silence = config.recovery.hang_timeout_seconds
    if silence is not None and silence < MIN_SILENCE:
        told = f"a start is silent for longer than {silence:g} seconds, so every attempt would count as hung; raise it"
        yield Issue(told, "recovery.hang_timeout_seconds")


@check("endless", "error", "budget.max_hours")
def endless_program_has_a_limit(config: Config) -> Iterator[Issue]:
    """A program that never ends is billed until someone remembers it."""
    if not config.program.endless or config.code.stand_in or config.cloud.kind != "gcp":
        return
    if config.budget.max_hours is None and config.budget.max_usd is None:
        yield Issue("the program never ends (program.endless); set the hours after which the run ends, or max_usd")


@check("trc_zone", "error", "tpu.zone", of_pods=True)
def zone_is_in_grant(config: Config) -> Iterator[Issue]:
    """TPU Research Cloud TPUs are free only in the zones of the grant. Elsewhere they are billed in full."""
    if config.cloud.trc is None:
        return
    for zone in config.tpu.all_zones:
        if zone not in config.cloud.trc.zones:
            zones = ", ".join(config.cloud.trc.zones)
            yield Issue(
                f"{zone} is not in the TRC grant ({zones}), so TPUs there are billed; to allow that, set cloud.trc=null"
            )


@check("kept_forever", "warning", "cleanup.idle_minutes", of_pods=True)
def failed_pods_are_deleted(config: Config) -> Iterator[Issue]:
    """A pod that is kept after a failure is billed until someone deletes it."""
    if config.cleanup.on_failure == "keep" and config.cleanup.idle_minutes is None:
        yield Issue("null with cleanup.on_failure=keep bills a failed pod until you run `slipway down`")


@check("thresholds", "error", "cloud.billing_budget.thresholds", of_pods=True)
def thresholds_are_fractions(config: Config) -> Iterator[Issue]:
    """Thresholds are fractions: 50 means 5,000%, which Google accepts, and then never sends an email."""
    budget = config.cloud.billing_budget
    if budget is not None and any(not 0 < share <= 2 for share in budget.thresholds):
        yield Issue("must be fractions of the amount, e.g. 0.5 for 50%")


@check("trc_ended", "warning", "cloud.trc.free_until", live=True, of_pods=True)
def grant_has_not_ended(config: Config, context: Context) -> Iterator[Issue]:
    """Grants end after about 30 days, and the bill is the only notice."""
    trc = config.cloud.trc
    if trc is None:
        return
    today = datetime.fromtimestamp(context.clock.now(), UTC).date()
    left = (trc.free_until - today).days
    if left < 0:
        yield Issue(
            f"the grant ended on {trc.free_until} and TPUs are billed; ask TRC to extend it, or set cloud.trc=null"
        )
    elif left < 3:
        yield Issue(f"the grant ends on {trc.free_until}; later hours of the run are billed")


@check("zone", "error", "tpu.zone", "tpu.fallback_zones", also="warning", of_pods=True)
def zone_has_type(config: Config) -> Iterator[Issue]:
    """Each generation, and its flex-start, is available in some zones only. The table may be too old to list a zone:
    then Google knows better, so this is a warning; of a region without a range of addresses in conf/regions.yaml, it is
    an error until network.cidr sets one. Of its own zones, the emulated cloud knows all.
    """
    topology, flex = config.topology, "flex_start" in config.tpu.capacity
    zones = ", ".join(topology.zones)
    for zone in config.tpu.all_zones:
        key, known = zone_key(config, zone), is_known_zone(zone)
        region = zone.rpartition("-")[0]
        lacks_range = (config.network.cidr, config.network.mode) == (None, "custom") and not subnet_range(region)
        if not topology.zones and not lacks_range:
            continue
        if not known:
            near = get_close_matches(zone, topology.zones, n=1, cutoff=0.8)
            message = f"slipway does not know {zone} (conf/tpu_types.yaml); "
            message += f"did you mean {near[0]}? " if near else ""
            message += f"zones with {topology.generation}: {zones}"
            message += f"; if {region} is new, set network.cidr too, e.g. 10.80.0.0/20" if lacks_range else ""
            yield Issue(message, key, "error" if lacks_range else "warning")
        elif zone not in topology.zones:
            message = f"{zone} has no {topology.generation}; zones that have it: {zones}"
            yield Issue(message, key, "error" if config.cloud.kind == "local" else "warning")
        if flex and zone not in topology.flex_start_zones:
            others = ", ".join(topology.flex_start_zones) or "none"
            message = (
                f"Google names no flex_start of {topology.generation} in {zone}, so that it may wait in vain; zones"
            )
            yield Issue(f"{message} that have it: {others}", key, "warning")


@check("plane", "error", "tpu.plane", "tpu.accelerator_type", "tpu.machine_type", "tpu.max_run_hours",
       "tpu.provisioner", of_pods=True)  # fmt: skip
def plane_serves_the_config(config: Config) -> Iterator[Issue]:
    """Google's TPU API lacks new generations, Compute Engine lacks old ones, and some keys exist on one plane only.
    With tpu.plane=auto, a plane that cannot serve a key is not tried.
    """
    if config.tpu.plane not in plane_choices():
        yield Issue(f"there is no plane {config.tpu.plane!r}; choices: {', '.join(plane_choices())}")
        return
    for plane in planes_for(config):
        yield from plane.checks.obstacles(config)


@check("tier", "error", "tpu.capacity", "tpu.provisioner", "tpu.reservation", "tpu.max_run_hours", of_pods=True)
def tier_exists(config: Config) -> Iterator[Issue]:
    """Some tiers exist on one plane only, and some need a queued resource, a node, a reservation or a duration. Google
    ends every flex-start pod after seven days.
    """
    for tier in config.tpu.capacity:
        found = [list(plane.checks.tier_obstacles(config, tier)) for plane in planes_for(config)]
        if all(found):
            yield from dict.fromkeys(issue for each in found for issue in each)


@check("runtime", "warning", "tpu.runtime_version", also="error", of_pods=True)
def runtime_matches_type(config: Config) -> Iterator[Issue]:
    """A slice boots with another generation's image, but JAX finds no TPU on it. An image that is certainly wrong is an
    error: one of another generation, such as `v2-alpha`, which is older than v5e, or `tpu-ubuntu2204-base` on v6e.
    Compute Engine has images of its own.
    """
    for plane in planes_for(config):
        yield from plane.checks.image(config)


@check("adopt", "error", "tpu.name", "tpu.data_disk_gb", of_pods=True)
def adopted_has_a_name(config: Config) -> Iterator[Issue]:
    """An adopted pod is found by name and never changed."""
    if config.tpu.adopt and config.tpu.name is None:
        yield Issue("tpu.adopt=true needs the name of the existing pod")
    if config.tpu.adopt and config.tpu.data_disk_gb is not None:
        yield Issue("an adopted pod cannot get a disk; set it to null", "tpu.data_disk_gb")


@check("data_disk", "error", "tpu.data_disk_gb", of_pods=True)
def disk_is_writable(config: Config) -> Iterator[Issue]:
    """Several VMs can share a disk only read-only: https://cloud.google.com/tpu/docs/setup-persistent-disk."""
    if config.tpu.data_disk_gb is not None and config.topology.workers > 1:
        yield Issue(
            f"a writable disk attaches to one VM only, and {config.tpu.accelerator_type} has "
            f"{config.topology.workers}; set it to null and write to the bucket"
        )


@check("subnet_overlap", "error", "network.cidr", of_pods=True)
def ranges_do_not_overlap(config: Config) -> Iterator[Issue]:
    """Google rejects two subnets with the same range in one network."""
    if config.network.cidr is not None and len(config.regions) > 1:
        yield Issue(
            f"one range cannot serve the zones' {len(config.regions)} regions; use null, so that each gets its own"
        )


@check("bucket_near", "error", "cloud.bucket_location", of_pods=True)
def bucket_is_near(config: Config) -> Iterator[Issue]:
    """Reads across regions are slow and billed, so a new bucket must serve every zone."""
    if config.cloud.bucket is not None:
        return  # only Google knows its location; `bucket_far` checks it
    location = config.cloud.bucket_location or config.region
    if far := [region for region in config.regions if not is_near(location, region)]:
        yield Issue(
            f"{location} does not serve {', '.join(far)}; set it to a multi-region (us, eu, asia) or drop those zones"
        )


@check("soft_delete_days", "error", "cloud.soft_delete_days", of_pods=True)
def soft_delete_is_possible(config: Config) -> Iterator[Issue]:
    """Soft delete is off or lasts at least a week: https://cloud.google.com/storage/docs/soft-delete."""
    if 0 < config.cloud.soft_delete_days < 7:
        yield Issue("must be 0 or 7 to 90")


@check(
    "type_offered",
    "error",
    "tpu.zone",
    "tpu.fallback_zones",
    "loop.sampler.tpu",
    also="warning",
    live=True,
    of_pods=True,
)
def offered_types(config: Config, context: Context) -> Iterator[Issue]:
    """Google's `acceleratorTypes.list`, or `machineTypes.get`, is authoritative for a zone."""
    if config.tpu.adopt:
        return
    yield from ask_planes(config, lambda checks: checks.offered_types(config, context))
    if (sampler := sampler_config(config)) and sampler.tpu.accelerator_type != config.tpu.accelerator_type:
        for issue in ask_planes(sampler, lambda checks: checks.offered_types(sampler, context)):
            yield issue._replace(key="loop.sampler.tpu")


@check("runtime_offered", "error", "tpu.runtime_version", also=("warning", "note"), live=True, of_pods=True)
def offered_runtimes(config: Config, context: Context) -> Iterator[Issue]:
    """Google rejects a mistyped image, but only after minutes. A documented image that its list lacks is only noted."""
    if not config.tpu.adopt:
        yield from ask_planes(config, lambda checks: checks.offered_images(config, context))


def is_known_zone(zone: str) -> bool:
    """Return whether the table lists the zone for any TPU generation."""
    return any(zone in generation["zones"] for generation in tpu_type_table()["generations"].values())

"""The TPU API's quota of chips: by generation, zone and capacity tier."""

from collections.abc import Iterator

from conf.schema.config import Config
from controller.context import Context
from controller.core.finding import Issue
from controller.gcp.quota import quota_metrics

SERVING_METRIC, SERVING_CHIPS = "tpu-v5s-litepod-serving", 8
"""v5e slices of up to so many chips draw on a quota of their own: https://cloud.google.com/tpu/docs/v5e."""
METRICS = {
    "v4": ("tpu-v4", "tpu-v4s"),
    "v5e": ("tpu-v5s-litepod", SERVING_METRIC),
    "v5p": ("tpu-v5p",),
    "v6e": ("tpu-v6e",),
}
"""Quota metrics by generation, without the prefix `tpu.googleapis.com/` and the suffix for the capacity tier."""
SUFFIXES = {"on_demand": "", "spot": "-preemptible", "preemptible": "-preemptible"}


def check_quota(config: Config, context: Context, chips: int | None = None) -> Iterator[Issue]:
    """Yield the quotas that are too small; with tpu.plane=auto also those that suffice, since there are two pools."""
    limits = quota_limits(context)
    wanted = [(zone, capacity) for zone in config.tpu.all_zones for capacity in config.tpu.capacity]
    topology = config.topology
    chips = chips or topology.chips
    if topology.chips > SERVING_CHIPS:
        limits = {key: limit for key, limit in limits.items() if not key[0].startswith(SERVING_METRIC)}
    known = {place: quota_limit(limits, topology.generation, *place) for place in wanted}
    short = {place: limit for place, limit in known.items() if limit is not None and limit < chips}
    for (zone, capacity), limit in short.items():
        yield Issue(
            f"no {config.tpu.accelerator_type} {capacity} quota in {zone}: the limit is {limit:.0f}, and "
            f"{chips} are needed; request more (IAM & Admin > Quotas), or change tpu.capacity or tpu.zone",
            severity="error" if len(short) == len(wanted) else "warning",
        )
    if config.tpu.plane == "auto" and topology.image_family:
        for (zone, capacity), limit in known.items():
            if limit is not None and (zone, capacity) not in short:
                what = f"{config.tpu.accelerator_type} {capacity} draws on the TPU API's quota in {zone}, which is"
                yield Issue(f"{what} {'unlimited' if limit == float('inf') else f'{limit:.0f}'}", severity="note")
    if topology.generation == "v5e" and topology.chips <= SERVING_CHIPS:
        for zone, capacity in known.keys() - short.keys():
            serving = _limit(limits, SERVING_METRIC, zone, capacity)
            if serving is not None and serving < chips:
                message = f"{config.tpu.accelerator_type} {capacity} draws on the serving quota in {zone}, which is "
                yield Issue(f"{message}{serving:.0f}; request more, or choose a larger slice", severity="warning")


def quota_limits(context: Context) -> dict[tuple[str, str], float]:
    """Return the quota by (metric, zone). An empty zone covers all other zones; -1 means no limit."""
    limits: dict[tuple[str, str], float] = {}
    for metric in quota_metrics(context, "tpu.googleapis.com"):
        name = metric.get("metric", "").rpartition("/")[2]
        for limit in metric.get("consumerQuotaLimits", []):
            if "{zone}" not in limit.get("unit", ""):
                continue
            for bucket in limit.get("quotaBuckets", []):
                zone = bucket.get("dimensions", {}).get("zone", "")
                limits[name, zone] = float(bucket.get("effectiveLimit", 0))
    return limits


def quota_limit(limits: dict[tuple[str, str], float], generation: str, zone: str, capacity: str) -> float | None:
    """Return the largest applicable limit, `inf` if unlimited; None if the response has no known metric."""
    found = [_limit(limits, metric, zone, capacity) for metric in METRICS.get(generation, ())]
    return max((limit for limit in found if limit is not None), default=None)


def _limit(limits: dict[tuple[str, str], float], metric: str, zone: str, capacity: str) -> float | None:
    if capacity not in SUFFIXES:
        return None
    name = metric + SUFFIXES[capacity]
    limit = limits.get((name, zone), limits.get((name, "")))
    return float("inf") if limit is not None and limit < 0 else limit

"""Compute Engine's quota of TPU chips: pools per region, apart from those of the TPU API."""

from collections.abc import Iterator

from conf.schema.config import Config
from controller.context import Context
from controller.core.finding import Issue
from controller.gcp.quota import quota_metrics

FAMILIES = {"v5p": "CT5P", "v6e": "CT6E", "tpu7x": "TPU7X"}
"""Values of the dimension `tpu_family` of the standard quota, by generation."""


def check_quota(config: Config, context: Context, chips: int | None = None) -> Iterator[Issue]:
    """Yield the pools that a request will draw on: what the TPU API's pools hold is no use there.

    Google does not document that it shows them, so a pool that is not listed is only noted.
    """
    generation = config.topology.generation
    chips = chips or config.topology.chips
    limits = limits_of(context)
    standard, preemptible = FAMILIES[generation], f"preemptible_tpu_{generation.removeprefix('tpu')}"
    pools = {"on_demand": (standard,), "spot": (preemptible,), "flex_start": (preemptible, standard)}
    wanted = [(region, tier) for region in config.regions for tier in config.tpu.capacity if tier in pools]
    known = {place: [limits.get((pool, place[0])) for pool in pools[place[1]]] for place in wanted}
    short = {place: found for place, found in known.items() if all(n is not None and n < chips for n in found)}
    for region, tier in wanted:
        found = known[region, tier]
        names = " and then ".join(_pool_name(pool) for pool in pools[tier])
        what = f"{config.tpu.accelerator_type} {tier} draws on Compute Engine's quota {names} in {region}"
        if (region, tier) in short:
            most = max(limit for limit in found if limit is not None)
            yield Issue(
                f"{what}, which is {most:.0f}, and {chips} are needed; that of the TPU API does not count. Request "
                "more (IAM & Admin > Quotas), or change tpu.capacity, tpu.zone or tpu.plane",
                severity="error" if len(short) == len(wanted) else "warning",
            )
        elif None in found:
            yield Issue(f"{what}, not on the TPU API's; Google does not show how much that is", severity="note")
        elif config.tpu.plane == "auto":
            limit = max(limit for limit in found if limit is not None)
            yield Issue(f"{what}, which is {'unlimited' if limit == float('inf') else f'{limit:.0f}'}", severity="note")


def _pool_name(pool: str) -> str:
    return pool.upper() if pool.startswith("preemptible") else f"TPUS_PER_TPU_FAMILY ({pool})"


def limits_of(context: Context) -> dict[tuple[str, str], float]:
    """Return the limits by (family or preemptible_tpu_v6e, region)."""
    limits: dict[tuple[str, str], float] = {}
    for metric in quota_metrics(context, "compute.googleapis.com"):
        name = metric.get("metric", "").rpartition("/")[2].lower().replace("-", "_")
        if name != "tpus_per_tpu_family" and not name.startswith("preemptible_tpu_"):
            continue
        for limit in metric.get("consumerQuotaLimits", []):
            for bucket in limit.get("quotaBuckets", []):
                where = bucket.get("dimensions", {})
                value = float(bucket.get("effectiveLimit", 0))
                if region := where.get("region"):
                    limits[where.get("tpu_family", name), region] = float("inf") if value < 0 else value
    return limits

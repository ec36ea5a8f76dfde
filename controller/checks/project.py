"""Project: you have permission to use it, and it has billing and quota."""

from collections.abc import Iterator
from typing import Any

from conf.schema.config import Config
from controller.context import Context
from controller.core.finding import Issue, check
from controller.gcp.errors import ForbiddenError, ServiceDisabledError

SERVING_METRIC, SERVING_CHIPS = "tpu-v5s-litepod-serving", 8
"""v5e slices of up to so many chips draw on a quota of their own: https://cloud.google.com/tpu/docs/v5e."""
METRICS = {
    "v4": ("tpu-v4", "tpu-v4s"),
    "v5e": ("tpu-v5s-litepod", SERVING_METRIC),
    "v5p": ("tpu-v5p",),
    "v6e": ("tpu-v6e",),
}
"""Quota metrics by generation, without the prefix `tpu.googleapis.com/` and the suffix for the capacity tier."""
FAMILIES = {"v5p": "CT5P", "v6e": "CT6E", "tpu7x": "TPU7X"}
"""Values of the dimension `tpu_family` of Compute Engine's standard quota, by generation."""
SUFFIXES = {"on_demand": "", "spot": "-preemptible", "preemptible": "-preemptible"}


@check("credentials", "warning", "cloud", live=True)
def has_credentials(config: Config, context: Context) -> Iterator[Issue]:
    """Requests need application-default credentials, which `gcloud auth login` alone does not create."""
    if not context.google.has_credentials:
        yield Issue(
            "no Google credentials, so nothing was checked; run `gcloud auth login` and `gcloud auth "
            "application-default login`, or set cloud=local"
        )


@check("billing", "error", "cloud.project", live=True)
def billing_is_enabled(config: Config, context: Context) -> Iterator[Issue]:
    """A project without billing rejects every TPU, and the error does not mention billing."""
    name = f"projects/{context.project}"
    try:
        answer = context.google.call("cloudbilling", "projects.getBillingInfo", name=name)
    except (ForbiddenError, ServiceDisabledError):
        return  # few users can see billing, and none need to
    if not answer.get("billingEnabled"):
        yield Issue(
            f"{context.project} has no billing account; run `gcloud billing projects link {context.project} "
            "--billing-account=ACCOUNT` (`gcloud billing accounts list` shows yours)"
        )


@check("tpu_permission", "error", "tpu.zone", live=True)
def tpus_may_be_listed(config: Config, context: Context) -> Iterator[Issue]:
    """Without permission to list TPUs in a zone you cannot create one; the error has three possible causes."""
    parent, role = f"projects/{context.project}/locations/{config.tpu.zone}", "roles/tpu.admin"
    try:
        if config.tpu.on_compute_engine:
            role = "roles/compute.instanceAdmin.v1"
            where = {"project": context.project, "zone": config.tpu.zone}
            context.google.call("compute", "instances.list", **where, maxResults=1)
        else:
            context.google.call("tpu", "projects.locations.nodes.list", parent=parent, pageSize=1)
    except ServiceDisabledError:
        return
    except ForbiddenError as error:
        yield Issue(
            f"no permission to list TPUs in {config.tpu.zone} ({error.message}). Possible causes: your account lacks "
            f"{role} in the project; cloud.project is not the project with the TPUs (for TRC, the one in your "
            "application); the zone is not available to you (for TRC, use the zones in the email)"
        )


@check("quota", "error", "tpu.zone", also=("warning", "note"), live=True)
def quota_suffices(config: Config, context: Context) -> Iterator[Issue]:
    """TPU quota is set per generation, zone and capacity tier, and starts at 0 almost everywhere. Compute Engine has
    another pool, per region.
    """
    if config.tpu.on_compute_engine:
        yield from compute_engine_quota(config, context)
        return
    limits = quota_limits(context)
    wanted = [(zone, capacity) for zone in config.tpu.all_zones for capacity in config.tpu.capacity]
    topology = config.topology
    if topology.chips > SERVING_CHIPS:
        limits = {key: limit for key, limit in limits.items() if not key[0].startswith(SERVING_METRIC)}
    known = {place: quota_limit(limits, topology.generation, *place) for place in wanted}
    short = {place: limit for place, limit in known.items() if limit is not None and limit < topology.chips}
    for (zone, capacity), limit in short.items():
        yield Issue(
            f"no {config.tpu.accelerator_type} {capacity} quota in {zone}: the limit is {limit:.0f}, and "
            f"{topology.chips} are needed; request more (IAM & Admin > Quotas), or change tpu.capacity or tpu.zone",
            severity="error" if len(short) == len(wanted) else "warning",
        )
    if topology.generation == "v5e" and topology.chips <= SERVING_CHIPS:
        for zone, capacity in known.keys() - short.keys():
            serving = _limit(limits, SERVING_METRIC, zone, capacity)
            if serving is not None and serving < topology.chips:
                message = f"{config.tpu.accelerator_type} {capacity} draws on the serving quota in {zone}, which is "
                yield Issue(f"{message}{serving:.0f}; request more, or choose a larger slice", severity="warning")


@check("compute_quota", "error", "tpu.external_ip", also="warning", live=True)
def compute_quota_suffices(config: Config, context: Context) -> Iterator[Issue]:
    """Each worker takes a VM and, with an external address, an address of the region. New projects have 4 to 8."""
    if config.tpu.adopt:
        return
    workers = config.topology.workers
    wanted = {"INSTANCES": workers + (config.recovery.driver == "bastion")}
    if config.external_ip:
        wanted["IN_USE_ADDRESSES"] = workers
    more = "raise cloud.quotas" if config.cloud.kind == "local" else "request more (IAM & Admin > Quotas)"
    remedy = {"INSTANCES": more, "IN_USE_ADDRESSES": f"set tpu.external_ip=false, or {more}"}
    for region in config.regions:
        quotas = context.google.call("compute", "regions.get", project=context.project, region=region).get("quotas", [])
        for quota in quotas:
            metric, limit = quota.get("metric"), quota.get("limit", 0)
            if metric in wanted and wanted[metric] > limit:
                yield Issue(
                    f"{config.tpu.accelerator_type} needs {wanted[metric]} of Compute quota {metric} in {region}, "
                    f"which is {limit:.0f}; {remedy[metric]}",
                    severity="error" if len(config.regions) == 1 else "warning",
                )


def compute_engine_quota(config: Config, context: Context) -> Iterator[Issue]:
    """Yield the pools of Compute Engine that a request will draw on: what the TPU API's pools hold is no use there.

    Google does not document that it shows them, so a pool that is not listed is only noted.
    """
    generation, chips = config.topology.generation, config.topology.chips
    limits = compute_engine_limits(context)
    standard, preemptible = FAMILIES[generation], f"preemptible_tpu_{generation.removeprefix('tpu')}"
    pools = {"on_demand": (standard,), "spot": (preemptible,), "flex_start": (preemptible, standard)}
    wanted = [(region, tier) for region in config.regions for tier in config.tpu.capacity if tier in pools]
    known = {place: [limits.get((pool, place[0])) for pool in pools[place[1]]] for place in wanted}
    short = {place: found for place, found in known.items() if all(n is not None and n < chips for n in found)}
    for region, tier in wanted:
        names = " and then ".join(_pool_name(pool) for pool in pools[tier])
        what = f"{config.tpu.accelerator_type} {tier} draws on Compute Engine's quota {names} in {region}"
        if (region, tier) in short:
            most = max(limit for limit in short[region, tier] if limit is not None)
            yield Issue(
                f"{what}, which is {most:.0f}, and {chips} are needed; that of the TPU API does not count. Request "
                "more (IAM & Admin > Quotas), or change tpu.capacity, tpu.zone or tpu.plane",
                severity="error" if len(short) == len(wanted) else "warning",
            )
        elif None in known[region, tier]:
            yield Issue(f"{what}, not on the TPU API's; Google does not show how much that is", severity="note")


def _pool_name(pool: str) -> str:
    return pool.upper() if pool.startswith("preemptible") else f"TPUS_PER_TPU_FAMILY ({pool})"


def compute_engine_limits(context: Context) -> dict[tuple[str, str], float]:
    """Return Compute Engine's quotas of TPU chips, by (family or preemptible_tpu_v6e, region)."""
    limits: dict[tuple[str, str], float] = {}
    for metric in _quota_metrics(context, "compute.googleapis.com"):
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


def _quota_metrics(context: Context, service: str) -> Iterator[dict[str, Any]]:
    """Yield the quota metrics of an API.

    https://cloud.google.com/service-usage/docs/reference/rest/v1beta1/services.consumerQuotaMetrics/list
    """
    method, parent = "services.consumerQuotaMetrics.list", f"projects/{context.project}/services/{service}"
    return context.google.list_all("serviceusage:v1beta1", method, "metrics", parent=parent, view="FULL", pageSize=500)


def quota_limits(context: Context) -> dict[tuple[str, str], float]:
    """Return the quota by (metric, zone). An empty zone covers all other zones; -1 means no limit."""
    limits: dict[tuple[str, str], float] = {}
    for metric in _quota_metrics(context, "tpu.googleapis.com"):
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

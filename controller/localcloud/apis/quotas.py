"""Quotas of the project: Compute's by region and the TPU API's by zone. What the checks read is what is enforced.

Words of the refusals: field reports, e.g. https://github.com/AI-Hypercomputer/xpk/issues.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any

from controller.localcloud.apis.catalog import AcceleratorType, Catalog, cpus_of, load_catalog, tpu_machine
from controller.localcloud.http.call import PROJECT, PROJECT_NUMBER, as_proto
from controller.localcloud.http.errors import ApiError, quota_exceeded
from controller.localcloud.store import Document, Store


def holds_quota(queued: Document) -> bool:
    """Return whether a request counts against the quota for TPUs: from its creation until its resources are gone.

    By the API's description of SUSPENDED, those of such a request are deleted.
    """
    return queued["state"]["state"] not in ("FAILED", "SUSPENDED")


def multi_slice_spec(spec: Document) -> Document | None:
    """Return the multislice parameters of a nodeSpec, if any; v2alpha1 names them differently."""
    return spec.get("multisliceParams") or spec.get("multiNodeParams")


def capacity_tier(queued: Mapping[str, Any]) -> str:
    """Return the tier that a request asks for."""
    if queued.get("provisioningModel") == "FLEX_START":
        return "flex_start"
    return "spot" if "spot" in queued else "reserved" if "reservationName" in queued else "on_demand"


def requested_nodes(queued: Document) -> list[tuple[str, dict[str, Any]]]:
    """Return (node ID, node) for every node of a request, with its tier as the node's schedulingConfig."""
    scheduling = {"spot": "spot" in queued, "preemptible": False, "reserved": "reservationName" in queued}
    wanted = []
    for spec in queued["tpu"]["nodeSpec"]:
        body = {"schedulingConfig": scheduling, **spec["node"]}
        if slices := multi_slice_spec(spec):
            prefix = slices.get("nodeIdPrefix") or queued["name"].rpartition("/")[2]
            wanted += [(f"{prefix}-{index}", body) for index in range(int(slices["nodeCount"]))]
        else:
            wanted.append((spec["nodeId"], body))
    return wanted


def state_document(state: str, initiator: str = "SERVICE") -> Document:
    """Return the state of a request as the API shows it; `initiator` is USER where the user deleted its nodes."""
    data = {} if state == "WAITING_FOR_RESOURCES" else {f"{state.lower()}Data": {}}
    return {"state": state, "stateInitiator": initiator, **data}


COMPUTE_LIMITS = {
    "INSTANCES": 9, "IN_USE_ADDRESSES": 5, "CPUS": 24, "E2_CPUS": 24, "SSD_TOTAL_GB": 40960, "HDB_TOTAL_GB": 40960,
}  # fmt: skip
"""Limits of a new project in each region, so that 8 VMs and 4 addresses are free; those of disks are an older one's."""
ALL_REGIONS = {"CPUS_ALL_REGIONS": 32}
"""Limits of the project; TPU VMs draw on no quota of CPUs. Field reports have 12 to 32 for a new one."""
_DISKS = {"hyperdisk-balanced": "HDB_TOTAL_GB", "pd-balanced": "SSD_TOTAL_GB", "pd-ssd": "SSD_TOTAL_GB"}
USED_BY_OTHERS = 1
"""What somebody else's VM, of which nothing but this is seen, uses of each of them."""
TPU_LIMIT = 4096
"""Chips in each zone and in each region. A real project has none until it asks, when an emulated one were of no use."""
PER_REGION = "-per-region"
"""What follows the name of a metric of the TPU API in that of its limit in each region."""
_DEFAULT_PREEMPTIBLE = 1536
"""Chips of Compute Engine's preemptible quota of a new project."""
_SERVING_CHIPS = 8
"""v5e slices of up to so many chips draw on the serving quota: https://cloud.google.com/tpu/docs/v5e."""
_HOLDS_TPUS = ("STAGING", "ACTIVATING", "ACTIVE", "ACTIVE_DEGRADED", "REACTIVATING", "INCOMPLETE", "DEACTIVATING")
"""Phases of a slice whose VMs count."""
_METRIC_OF_POOL = ("TPUS_PER_TPU_FAMILY", "PREEMPTIBLE_TPUS")
_UNUSUAL_METRICS = {
    "v2": ("tpu-v2s", "TPUV2s{tier}"),
    "v3": ("tpu-v3s", "TPUV3s{tier}"),
    "v4": ("tpu-v4s", "TPUV4s{tier}Pod"),
    "v5e": ("tpu-v5s-litepod", "TPUV5s{tier}Litepod"),
    "v5e serving": ("tpu-v5s-litepod-serving", "TPUV5s{tier}LitepodServing"),
}


@cache
def _metrics() -> dict[str, tuple[str, str]]:
    """Return the metric of each generation without prefix and suffix, and how a refusal calls its limit."""
    later = sorted(load_catalog().of_tpu_api - _UNUSUAL_METRICS.keys())
    return {**_UNUSUAL_METRICS, **{name: (f"tpu-{name}", f"TPU{name.upper()}{{tier}}") for name in later}}


def metric_names() -> list[str]:
    """Return the names of all TPU metrics, without `tpu.googleapis.com/`."""
    return [f"{name}{suffix}" for name, _ in _metrics().values() for suffix in ("", "-preemptible")]


def pool_names() -> list[str]:
    """Return the names of Compute Engine's quotas of TPUs, a pool apart from that of the TPU API."""
    return [name for family in load_catalog().families for name in _pools(family)]


def _pools(family: str) -> tuple[str, str]:
    """Return the names of the standard and the preemptible quota of a family, such as CT6E."""
    generation = load_catalog().families[family].removeprefix("tpu")
    return f"tpus-per-tpu-family-{family.lower()}", f"preemptible-tpu-{generation}"


def check_limits(limits: object) -> None:
    """Raise ApiError 400 unless these are limits by the name of a quota."""
    by_region = [f"{name}{PER_REGION}" for name in metric_names()]
    known = [*COMPUTE_LIMITS, *ALL_REGIONS, *metric_names(), *by_region, *pool_names()]
    if not isinstance(limits, Mapping):
        raise ApiError(400, f"cloud.quotas: must be limits by name; known: {', '.join(known)}")
    for name in (name for name in limits if name not in known):
        by_letters = {each.lower().replace("_", "-"): each for each in known}
        near = get_close_matches(str(name).lower().replace("_", "-"), by_letters, n=3)
        hint = f"closest: {', '.join(by_letters[each] for each in near)}" if near else f"known: {', '.join(known)}"
        raise ApiError(400, f"cloud.quotas: the emulated project has no quota {name!r}; {hint}")
    for name, limit in limits.items():
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ApiError(400, f"cloud.quotas: {name} must be a whole number of at least 0, not {limit!r}")


@dataclass(frozen=True)
class Quotas:
    """Limits and use of every quota.

    Attributes:
        overrides: returns the limits that differ from those above.
        lag: returns for how many seconds the usage of a region is shown as it was.
    """

    store: Store
    catalog: Catalog
    overrides: Callable[[], Mapping[str, int]]
    lag: Callable[[], float] = lambda: 0.0
    _shown: dict[str, tuple[float, dict[str, int]]] = field(default_factory=dict[str, tuple[float, dict[str, int]]])
    """By region: the usage that is shown, and since when."""

    def _limit(self, name: str) -> int:
        return self.overrides().get(name, {**COMPUTE_LIMITS, **ALL_REGIONS}.get(name, TPU_LIMIT))

    # Compute Engine

    def compute_quotas(self, region: str) -> list[Document]:
        """Return `quotas` of a region as `regions.get` shows them."""
        since, usage = self._shown.get(region, (0.0, {}))
        if not since <= time.time() < since + self.lag():
            usage = self._compute_usage(region)
            self._shown[region] = time.time(), usage
        return self._show(usage)

    def project_quotas(self) -> list[Document]:
        """Return `quotas` of the project as `projects.get` shows them."""
        return self._show(self._compute_usage(""))

    def _show(self, usage: Mapping[str, int]) -> list[Document]:
        limits = {name: float(self._limit(name)) for name in usage}
        return [{"metric": name, "limit": limits[name], "usage": float(used)} for name, used in usage.items()]

    def check_room(self, zone: str, kind: str, body: Mapping[str, Any]) -> None:
        """Raise ApiError 403 if the region has no room for another instance or disk."""
        region, wanted = zone.rpartition("-")[0], _draws(kind, body)
        for name, used in (self._compute_usage(region) | self._compute_usage("")).items():
            if wanted[name] and used + wanted[name] > self._limit(name):
                raise quota_exceeded(name, self._limit(name), "" if name in ALL_REGIONS else region, "quotaExceeded")

    def exhausted_in(self, region: str) -> ApiError | None:
        """Return the error of a group whose VMs, stored already, do not fit the region."""
        for name, used in self._compute_usage(region).items():
            if used > self._limit(name):
                return quota_exceeded(name, self._limit(name), region)
        return None

    def exhausted_by(self, zone: str, uid: str) -> ApiError | None:
        """Return the error of a TPU node whose VMs do not fit the region; the node itself is stored already."""
        used = self._compute_usage(zone.rpartition("-")[0], last=uid)
        for name in ("IN_USE_ADDRESSES", "INSTANCES"):
            if used[name] > self._limit(name):
                request = f"Please request an increase of the limit. [EID: 0x{uid}]"
                return ApiError(429, f"You have reached {name} limit. {request}")
        return None

    def _compute_usage(self, region: str, last: str = "") -> dict[str, int]:
        """Return what is used in a region, "" for all of them, without nodes made after the node `last`."""
        used = Counter(dict.fromkeys(COMPUTE_LIMITS if region else ALL_REGIONS, USED_BY_OTHERS))
        for path, item in self.store.items("compute", f"projects/{PROJECT}/zones/{region and f'{region}-'}"):
            drawn = _draws(path.split("/")[4], item)
            used.update({name: drawn[name] for name in used})
        if not region:
            return dict(used)
        for _, node in self.store.items("node", f"projects/{PROJECT}/locations/{region}-"):
            if node["state"] in ("PREEMPTED", "STOPPED") or (last and int(node["id"]) > int(last)):
                continue  # it has no VMs
            vms = self.catalog.types[node["acceleratorType"]].vms
            used["INSTANCES"] += vms
            used["IN_USE_ADDRESSES"] += vms if node["networkConfig"].get("enableExternalIps") else 0
        return dict(used)

    # TPUs of Compute Engine

    def short_of_tpus(self, uid: str) -> ApiError | None:
        """Return the error of a slice that the region has no quota for, beside those made before it, or None.

        Spot VMs draw on the preemptible quota, flex-start VMs on it first and then on the standard one.
        """
        wanted = self.store.get("slice", uid) or {}
        region, family = wanted["zone"].rpartition("-")[0], self.catalog.machines[wanted["machine"]].family
        standard, preemptible = _pools(family)
        left = {name: self._limit(name) for name in (standard, preemptible)}
        made = sorted(self.store.items("slice"), key=lambda item: int(item[0]))
        for name, other in made:
            drawn = other["chips"] * (len(other["members"]) if name == uid else self._live_vms(other))
            alike = self.catalog.machines[other["machine"]].family == family
            here = other["zone"].rpartition("-")[0] == region and alike
            draws = here and (name == uid or other["phase"] in _HOLDS_TPUS)
            if not draws or other["tier"] == "reserved":
                continue
            pools = {"spot": [preemptible], "flex_start": [preemptible, standard]}.get(other["tier"], [standard])
            pool = next((pool for pool in pools if left[pool] >= drawn), None)
            if pool is not None:
                left[pool] -= drawn
            elif name == uid:
                return quota_exceeded(_METRIC_OF_POOL[pools[0] == preemptible], self._limit(pools[0]), region)
            if name == uid:
                return None
        return None

    def _live_vms(self, found: Document) -> int:
        """Return how many VMs of a slice exist and have not stopped."""
        zone = f"projects/{PROJECT}/zones/{found['zone']}/instances/"
        instances = (self.store.get("compute", zone + name) for name in found["members"])
        return sum(1 for instance in instances if instance and instance["status"] != "TERMINATED")

    # TPUs

    def check_tpus(self, zone: str, kinds: Sequence[AcceleratorType], tier: str) -> None:
        """Raise ApiError 429 if zone or region have too little quota for more nodes of these types in that tier."""
        preemptible, region = tier in ("spot", "preemptible"), zone.rpartition("-")[0]
        for kind in dict.fromkeys(kinds) if tier in ("on_demand", "spot", "preemptible") else ():
            metric, label = _metrics().get(_quota_of(kind), ("", ""))
            name = f"{metric}-preemptible" if preemptible else metric
            label = f"{label.format(tier='Preemptible' if preemptible else '')}PerProjectPer"
            full: list[tuple[str, int, str]] = []
            for place, prefix, limit in (
                (f"region {region}", f"{region}-", self._limit(f"{name}{PER_REGION}")),
                (f"zone {zone}", f"{zone}/", self._limit(name)),
            ):
                held = [*((one, preemptible) for one in kinds), *self._held_by_requests(prefix)]
                held += self._held_by_nodes(prefix)
                alike = [one for one, spot in held if _quota_of(one) == _quota_of(kind) and spot == preemptible]
                if metric and sum(one.slice_chips for one in alike) > limit:
                    full.append((f"{label}{place.partition(' ')[0].title()}ForTPUAPI", limit, place))
            if full:  # words: https://github.com/BioMedBERT/biomedbert/blob/master/nohup.out
                labels, limits, places = (",".join(map(str, column)) for column in zip(*full, strict=True))
                raise ApiError(429, f"Quota limit '{labels}' has been exceeded. Limit: {limits} in {places}.")

    def _held_by_requests(self, prefix: str) -> Iterator[tuple[AcceleratorType, bool]]:
        """Yield type and preemptibility of what queued resources hold, whether their nodes exist yet or not.

        `prefix`: of the locations, `us-east5-` or `us-east5-b/`.
        """
        for _, queued in self.store.items("queued", f"projects/{PROJECT}/locations/{prefix}"):
            if not holds_quota(queued):
                continue
            for _, body in requested_nodes(queued):
                kind = self.catalog.types.get(body.get("acceleratorType", ""))
                kind = kind or self.catalog.find_by_config(body.get("acceleratorConfig") or {})
                if kind is not None and capacity_tier(queued) in ("on_demand", "spot"):
                    yield kind, capacity_tier(queued) == "spot"

    def _held_by_nodes(self, prefix: str) -> Iterator[tuple[AcceleratorType, bool]]:
        """Yield type and preemptibility of nodes, but for those of a request that holds them."""
        for _, node in self.store.items("node", f"projects/{PROJECT}/locations/{prefix}"):
            queued = self.store.get("queued", node.get("queuedResource", ""))
            if queued is None or not holds_quota(queued):
                scheduling = node.get("schedulingConfig") or {}
                preemptible = bool(scheduling.get("spot") or scheduling.get("preemptible"))
                yield self.catalog.types[node["acceleratorType"]], preemptible

    def tpu_metrics(self) -> list[Document]:
        """Return the metrics of the TPU API as `consumerQuotaMetrics.list` of serviceusage v1beta1 shows them.

        Each has limits by region and by zone: https://github.com/marin-community/marin/pull/1612.
        """
        metrics = []
        for quota, (name, _) in _metrics().items():
            zones = sorted(self.catalog.zones_of[quota.partition(" ")[0]])
            regions = sorted({zone.rpartition("-")[0] for zone in zones})
            for short in (name, f"{name}-preemptible"):
                by_region = [({"region": region}, self._limit(f"{short}{PER_REGION}"), 0) for region in regions]
                by_zone = [({"zone": zone}, self._limit(short), 0) for zone in zones]
                limits = {"/{project}/{region}": [({}, 0, 0), *by_region], "/{project}/{zone}": [({}, 0, 0), *by_zone]}
                metrics.append(_metric("tpu", short, limits))
        return metrics

    def pool_metrics(self) -> list[Document]:
        """Return the metrics of Compute Engine's pools of TPUs in the same form, by region."""
        in_families: list[_Bucket] = []
        others: list[Document] = []
        for family, generation in self.catalog.families.items():
            standard, preemptible = _pools(family)
            regions = sorted({zone.rpartition("-")[0] for zone in self.catalog.zones_of[generation]})
            in_families += [({"region": one, "tpu_family": family}, self._limit(standard), 0) for one in regions]
            places = [({"region": one}, self._limit(preemptible), _DEFAULT_PREEMPTIBLE) for one in regions]
            others.append(_metric("compute", preemptible.replace("-", "_"), {"/{project}/{region}": places}))
        families = {"/{project}/{region}/{tpu_family}": in_families}
        return [_metric("compute", "tpus_per_tpu_family", families), *others]


_Bucket = tuple[dict[str, str], int, int]
"""Dimensions, limit and default of a quota in one place."""


def _metric(api: str, short: str, limits: Mapping[str, Sequence[_Bucket]]) -> Document:
    """Return a metric of serviceusage v1beta1 with its limits by their units, which start after the 1."""
    metric = f"{api}.googleapis.com/{short}"
    parent = f"projects/{PROJECT_NUMBER}/services/{api}.googleapis.com/consumerQuotaMetrics"
    name, listed = f"{parent}/{metric.replace('/', '%2F')}", list[Document]()
    for unit, places in limits.items():
        shown = [(str(limit or ""), str(default or ""), where or None) for where, limit, default in places]
        fields = ("effectiveLimit", "defaultLimit", "dimensions")
        buckets = [as_proto(dict(zip(fields, values, strict=True))) for values in shown]
        path = unit.replace("/", "%2F").replace("{", "").replace("}", "")
        listed.append({"name": f"{name}/limits/{path}", "metric": metric, "unit": f"1{unit}", "quotaBuckets": buckets})
    return {"name": name, "metric": metric, "unit": "1", "consumerQuotaLimits": listed}


def _quota_of(kind: AcceleratorType) -> str:
    return "v5e serving" if kind.generation == "v5e" and kind.slice_chips <= _SERVING_CHIPS else kind.generation


def _draws(kind: str, body: Mapping[str, Any]) -> Counter[str]:
    """Return what an instance or a disk draws on each quota of Compute Engine."""
    if kind == "disks":
        return Counter({_DISKS.get(body.get("type", "").rpartition("/")[2], ""): int(body.get("sizeGb") or 0)})
    if kind != "instances":
        return Counter()
    addresses = sum(len(card.get("accessConfigs") or ()) for card in body.get("networkInterfaces") or ())
    drawn = Counter(INSTANCES=1, IN_USE_ADDRESSES=addresses)
    machine = body.get("machineType", "").rpartition("/")[2]
    if tpu_machine(machine) is None:
        family = "E2_CPUS" if machine.startswith("e2-") else "CPUS"
        drawn.update(dict.fromkeys((family, *ALL_REGIONS), cpus_of(machine)))
    for made in (disk.get("initializeParams") or {} for disk in body.get("disks") or ()):
        drawn[_DISKS.get(made.get("diskType", "").rpartition("/")[2], "")] += int(made.get("diskSizeGb") or 0)
    return drawn

"""The Cloud TPU API as a plane: TPU nodes and queued resources, and what it can tell before one is made.

https://cloud.google.com/tpu/docs/reference/rest
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from conf.schema.config import Config
from conf.schema.topology import Topology, tpu_type_table, zone_region
from controller.context import Context
from controller.core.finding import Issue
from controller.core.text import nearest_names
from controller.gcp.answers import Caller, wait_rpc
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ForbiddenError, ServiceDisabledError
from controller.resources.pod import tpu_nodes
from controller.resources.pod.plane import CONSOLE, Leftover, PlaneChecks, PlaneMethods, is_of_run
from controller.resources.pod.provisioner import Place, Provisioner, ProvisionerName, SliceSpec, SliceStatus
from controller.resources.pod.refusals import PlaneAdvice, no_listing, quota_metrics, zone_key
from controller.resources.pod.tpu_nodes import API, zone_path
from controller.ssh.login import WorkerVms

IMAGES = {
    "v2, v3, v4": r"^v2-alpha$|^tpu-vm-",
    "v2, v3, v4, v5e, v5p": r"^tpu-ubuntu\d+-base$",
    "v4": r"tpu-?v4",
    "v5e": r"tpuv5-?lite|v5e",
    "v5p": r"tpuv5$|tpuv5p|v5p",
    "v6e": r"v6e",
    "tpu7x": r"tpu7",
}
"""The generations that an image is made for, by a pattern of its name: https://cloud.google.com/tpu/docs/runtimes.

Until v5e had an image of its own, Google named tpu-ubuntu2204-base for every generation. JAX finds no v6e with it:
https://github.com/dstackai/dstack/issues/2148.
"""


class TpuApiChecks:
    """Implements `PlaneChecks`."""

    def offers(self, topology: Topology) -> bool:
        return topology.on_tpu_api

    def obstacles(self, config: Config) -> Iterator[Issue]:
        topology, tpu = config.topology, config.tpu
        if not topology.on_tpu_api:
            message = f"the TPU API has no {topology.generation}; set it to auto or compute_engine"
            yield Issue(message, "tpu.plane")
        if tpu.machine_type is not None:
            yield Issue("the TPU API chooses the VMs; set it to null, or tpu.plane=compute_engine", "tpu.machine_type")
        if tpu.max_run_hours is not None:
            message = "only Compute Engine ends a pod by itself; set it to null and budget.max_hours, or tpu.plane"
            yield Issue(f"{message} to compute_engine", "tpu.max_run_hours")

    def tier_obstacles(self, config: Config, tier: str) -> Iterator[Issue]:
        tpu = config.tpu
        if tier == "flex_start" and tpu.provisioner == "node":
            yield Issue("flex_start needs a queued resource; set it to auto or queued", "tpu.provisioner")
        if tier == "preemptible" and tpu.provisioner == "queued":
            message = "queued resources do not support preemptible, which ends after 24 h; choose spot"
            yield Issue(message, "tpu.capacity")
        if tier == "reserved" and tpu.reservation is None and tpu.is_queued("reserved"):
            yield Issue("tpu.capacity=reserved needs the name of the reservation", "tpu.reservation")

    def image(self, config: Config) -> Iterator[Issue]:
        """An image that is certainly wrong is named after another generation or plane, or is older than v5e."""
        documented, wanted = config.topology.runtime_version, config.tpu.runtime_version
        generation = config.topology.generation
        if wanted in (None, documented):
            return
        generations = tpu_type_table()["generations"]
        if "/" in wanted or wanted in {facts["image_family"] for facts in generations.values()}:
            message = f"{wanted} is an image of Compute Engine; on the TPU API use {documented}, or null"
            yield Issue(message, "tpu.runtime_version", "error")
            return
        documented_for = ", ".join(name for name, facts in generations.items() if wanted == facts["runtime_version"])
        by_name = next((name for name, pattern in IMAGES.items() if re.search(pattern, wanted)), None)
        made_for = by_name or documented_for or None
        if made_for not in (None, generation) and generation not in (made_for or "").split(", "):
            message = f"{wanted} is an image for {made_for}, not for {generation}; use {documented}, or null"
            yield Issue(message, "tpu.runtime_version", "error")
        else:
            yield Issue(f"{wanted} is not the documented image for {generation}; use {documented}, or null")

    def offered_types(self, config: Config, context: Context) -> Iterator[Issue]:
        wanted = config.tpu.accelerator_type
        for zone in config.tpu.all_zones:
            listed = _listed(context, zone, "acceleratorTypes")
            if is_certainly_missing(wanted, listed):
                command = f"gcloud compute tpus accelerator-types list --zone={zone}"
                message = f"Google offers no {wanted} in {zone}; closest there: {nearest_names(wanted, listed)}"
                message += f"; `{command}` lists all"
                yield Issue(message, zone_key(config, zone))

    def offered_images(self, config: Config, context: Context) -> Iterator[Issue]:
        documented = config.topology.runtime_version
        wanted = config.tpu.runtime_version or documented
        for zone in config.tpu.all_zones:
            listed = _listed(context, zone, "runtimeVersions")
            if not is_certainly_missing(wanted, listed):
                continue
            if wanted == documented:
                yield Issue(f"Google's list for {zone} lacks {wanted}, the documented image", severity="note")
            else:
                closest = nearest_names(wanted, listed)
                command = f"gcloud compute tpus tpu-vm versions list --zone={zone}"
                message = f"Google offers no image {wanted} in {zone}; closest there: {closest}"
                yield Issue(f"{message}; `{command}` lists all")

    def listing(self, config: Config, context: Context) -> Iterator[Issue]:
        zone = config.tpu.zone
        try:
            context.google.call(API, "projects.locations.nodes.list", parent=zone_path(context, zone), pageSize=1)
        except ForbiddenError as error:
            yield no_listing(zone, "roles/tpu.admin", error)

    def quota(self, config: Config, context: Context, chips: int | None = None) -> Iterator[Issue]:
        """Yield the quotas that are too small; with tpu.plane=auto also those that suffice: there are two pools."""
        limits = quota_limits(context)
        wanted = [(zone, capacity) for zone in config.tpu.all_zones for capacity in config.tpu.capacity]
        topology = config.topology
        chips = chips or topology.chips
        if topology.chips > SERVING_CHIPS:
            limits = {key: limit for key, limit in limits.items() if not key[0].startswith(SERVING_METRIC)}
        known = {place: quota_limit(limits, topology.generation, *place) for place in wanted}
        short = {place: limit for place, limit in known.items() if limit is not None and limit.chips < chips}
        for (zone, capacity), limit in short.items():
            where = "" if limit.place == zone else f" in all of {limit.place}"
            yield Issue(
                f"no {config.tpu.accelerator_type} {capacity} quota in {zone}: the limit is {limit.chips:.0f}{where}, "
                f"and {chips} are needed; request more (IAM & Admin > Quotas), or change tpu.capacity or tpu.zone; "
                "`slipway init` lists the zones with quota",
                severity="error" if len(short) == len(wanted) else "warning",
            )
        if config.tpu.plane == "auto" and topology.image_family:
            for (zone, capacity), limit in known.items():
                if limit is not None and (zone, capacity) not in short:
                    what = f"{config.tpu.accelerator_type} {capacity} draws on the TPU API's quota in {limit.place}"
                    yield Issue(f"{what}, which is {limit}", severity="note")
        pool, held = _pool(topology.generation, topology.chips), chips_of_others(config, context)
        for (zone, capacity), limit in known.items():
            if limit is None or (zone, capacity) in short:
                continue
            what, suffix = f"{config.tpu.accelerator_type} {capacity} draws on", SUFFIXES[capacity]
            rows = _limits_at(limits, pool, zone, capacity) or [limit]
            if (least := min(rows)).chips < chips:
                message = f"{what} the serving quota in {least.place}, which is {least}; request more, or choose a"
                yield Issue(f"{message} larger slice", severity="warning")
                continue
            for enough in rows:
                places = [z for metric, z, kind in held if (metric, kind) == (pool, suffix)]
                others = sum(held[pool, z, suffix] for z in places if enough.place in (z, zone_region(z)))
                if enough.chips - others < chips:
                    message = f"{what} a quota of {enough} in {enough.place}, and other pods of the project hold"
                    yield Issue(f"{message} {others} of it; {chips} are needed", severity="warning")
                    break


def is_certainly_missing(wanted: str, listed: Set[str]) -> bool:
    """Return whether a nonempty list lacks the name. An empty list proves nothing."""
    return bool(listed) and wanted not in listed


def _listed(context: Context, zone: str, collection: str) -> Set[str]:
    parent = zone_path(context, zone)
    found = context.google.list_all(API, f"projects.locations.{collection}.list", collection, parent=parent)
    names = frozenset(item["name"].rpartition("/")[2] for item in found)
    return frozenset() if f"{collection} in {zone}" in context.google.unlisted else names


SERVING_METRIC, SERVING_CHIPS = "tpu-v5s-litepod-serving", 8
"""v5e slices of up to so many chips draw on a quota of their own: https://cloud.google.com/tpu/docs/v5e."""
SUFFIXES = {"on_demand": "", "spot": "-preemptible", "preemptible": "-preemptible"}


def metrics_of(generation: str) -> list[str]:
    """Return the quota metrics, without the prefix `tpu.googleapis.com/` and the suffix for the capacity tier."""
    facts = tpu_type_table()["generations"][generation]
    own = facts["quota_metrics"]
    return ([f"tpu-{generation}"] if facts["tpu_api"] else []) if own is None else own


def _pool(generation: str, chips: int) -> str:
    """Return the metric that a slice draws on."""
    is_serving = generation == "v5e" and chips <= SERVING_CHIPS
    return SERVING_METRIC if is_serving else next(iter(metrics_of(generation)), generation)


def chips_of_others(config: Config, context: Context) -> Counter[tuple[str, str, str]]:
    """Return the chips that pods other than a run's hold or wait for, by metric, zone and suffix of the metric.

    Google shows limits only: https://cloud.google.com/service-usage/docs/reference/rest/v1beta1/QuotaBucket
    """
    types, held = tpu_type_table()["types"], Counter[tuple[str, str, str]]()
    with suppress(ForbiddenError):  # `tpu_permission` tells it
        for status in TpuApi().slices(context):
            kind, tier = types.get(status.spec.accelerator_type), status.place.capacity
            is_live = (status.is_ready or status.pending) and status.state not in ("DELETING", "SUSPENDING")
            if kind is not None and is_live and tier in SUFFIXES and not is_of_run(config, status.name):
                held[_pool(kind[0], kind[1]), status.place.zone, SUFFIXES[tier]] += kind[1]
    return held


class Limit(NamedTuple):
    """How many chips are allowed in a zone, or in a region; `inf` if that is unlimited."""

    chips: float
    place: str

    def __str__(self) -> str:
        return "unlimited" if self.chips == float("inf") else f"{self.chips:.0f}"


Limits = Mapping[tuple[str, str], float]
"""Limits by metric and zone, or region; those of "zone" are of all other zones, those of "region" of other regions."""


def quota_limits(context: Context) -> Limits:
    """Return the quota of each metric. It has limits by zone and by region, and a request must be within both:
    https://github.com/marin-community/marin/pull/1612 (2025-09-19).
    """
    limits: dict[tuple[str, str], float] = {}
    for metric in quota_metrics(context, "tpu.googleapis.com"):
        name = metric.get("metric", "").rpartition("/")[2]
        for limit in metric.get("consumerQuotaLimits", []):
            kind = next((kind for kind in ("zone", "region") if f"{{{kind}}}" in limit.get("unit", "")), None)
            for bucket in limit.get("quotaBuckets", []) if kind else ():
                chips = float(bucket.get("effectiveLimit", 0))
                limits[name, bucket.get("dimensions", {}).get(kind, kind)] = chips if chips >= 0 else float("inf")
    return limits


def quota_limit(limits: Limits, generation: str, zone: str, capacity: str) -> Limit | None:
    """Return what is allowed in a zone, by the metric that allows most; None if the response has no known metric."""
    found = [_limits_at(limits, metric, zone, capacity) for metric in metrics_of(generation)]
    return max((min(rows) for rows in found if rows), default=None)


def _limits_at(limits: Limits, metric: str, zone: str, capacity: str) -> list[Limit]:
    """Return the known limits of a metric in a zone and in its region."""
    if capacity not in SUFFIXES:
        return []
    name = metric + SUFFIXES[capacity]
    places = (("zone", zone), ("region", zone_region(zone)))
    known = ((limits.get((name, place), limits.get((name, kind))), place) for kind, place in places)
    return [Limit(chips, place) for chips, place in known if chips is not None]


NODES = "tpu projects.locations.nodes."


class TpuApi:
    """Implements `Plane`."""

    title: ClassVar[str] = "the TPU API"
    queues: ClassVar[frozenset[ProvisionerName]] = frozenset({"queued"})
    account_roles: ClassVar[tuple[str, ...]] = ()
    methods: ClassVar[PlaneMethods] = PlaneMethods(
        check=(
            f"{NODES}list",
            "tpu projects.locations.queuedResources.list",
            "tpu projects.locations.acceleratorTypes.list",
            "tpu projects.locations.runtimeVersions.list",
        ),
        observe=(f"{NODES}get", f"{NODES}getGuestAttributes", "tpu projects.locations.operations.get"),
        own=(f"{NODES}create", f"{NODES}delete"),
        change=(f"{NODES}patch", f"{NODES}start", f"{NODES}stop"),
        add_key=(f"{NODES}patch",),
    )
    checks: ClassVar[PlaneChecks] = TpuApiChecks()
    advice: ClassVar[PlaneAdvice] = PlaneAdvice(
        role="roles/tpu.admin",
        types="gcloud compute tpus accelerator-types list --zone=ZONE",
        images="gcloud compute tpus tpu-vm versions list --zone=ZONE",
        more={
            "quota": "dead queued resources count too",
            "propagating": "for the TPU Service Agent, run `gcloud beta services identity create "
            "--service=tpu.googleapis.com`",
        },
    )

    def delete_permission(self, provisioner: ProvisionerName) -> str:
        return "tpu.nodes.delete"

    def spec(self, config: Config) -> SliceSpec:
        return SliceSpec.of(config, config.topology.runtime_version)

    def provisioner_for(self, config: Config, tier: str) -> ProvisionerName:
        return "queued" if config.tpu.is_queued(tier) else "node"

    def provisioners(self, create_seconds: float) -> Mapping[ProvisionerName, Provisioner]:
        return {
            "queued": tpu_nodes.QueuedProvisioner(create_seconds),
            "node": tpu_nodes.NodeProvisioner(create_seconds),
        }

    def slices(self, context: Context) -> Iterator[SliceStatus]:
        parent, known = f"projects/{context.project}/locations/-", set[tuple[str, str]]()
        try:
            for node in context.google.list_all(tpu_nodes.API, "projects.locations.nodes.list", "nodes", parent=parent):
                status = tpu_nodes.parse_node(node)
                known.add((status.place.zone, status.name))
                yield status
            method = "projects.locations.queuedResources.list"
            for request in context.google.list_all(tpu_nodes.API, method, "queuedResources", parent=parent):
                status = tpu_nodes.parse_request(request, None, context.clock.now())
                if (status.place.zone, status.name) not in known:
                    yield status
        except ServiceDisabledError:
            return  # where the API is off there are none

    def leftovers(self, context: Context) -> Iterator[Leftover]:
        return iter(())

    def delete_leftover(self, context: Context, leftover: Leftover) -> None:
        """Do nothing: a slice is a node and a request, and both are listed as slices."""

    def vms(self, context: Context, name: str, status: SliceStatus) -> WorkerVms:
        return NodeVms(tpu_nodes.node_path(context, name, status.place.zone))

    def deletions(self, context: Context, name: str, zone: str) -> list[str]:
        return tpu_nodes.deletions(context, name, zone)

    def console_url(self, project: str, name: str, place: Place) -> str:
        return f"{CONSOLE}/tpus/details/{place.zone}/{name}?project={project}"

    def delete_by_hand(self, context: Context, name: str, zone: str) -> None:
        tpu_nodes.delete_node(context, name, zone)

    def request_service_agent(self, context: Context, zone: str) -> None:
        method = "projects.locations.generateServiceIdentity"
        context.google.call(tpu_nodes.API, method, parent=tpu_nodes.zone_path(context, zone), body={})

    def cannot_stop(self, name: str, spec: SliceSpec, place: Place) -> str:
        """See https://cloud.google.com/tpu/docs/managing-tpus-tpu-vm."""
        if spec.workers > 1:
            return f"Google can stop only pods with one VM, and {name} has {spec.workers}"
        if place.capacity in ("spot", "preemptible"):
            return f"Google cannot stop {place.capacity} pods; `slipway down` deletes it"
        return ""

    def start(self, context: Context, name: str, zone: str, seconds: float) -> None:
        self._change(context, name, zone, "start", seconds)

    def stop(self, context: Context, name: str, zone: str, seconds: float) -> None:
        self._change(context, name, zone, "stop", seconds)

    def _change(self, context: Context, name: str, zone: str, verb: str, seconds: float) -> None:
        path = tpu_nodes.node_path(context, name, zone)
        operation = context.google.call(tpu_nodes.API, f"projects.locations.nodes.{verb}", name=path, body={})
        tpu_nodes.wait_done(context, operation, seconds)


@dataclass(frozen=True)
class NodeVms:
    """The VMs of a TPU node, whose metadata they share; `node` is its full resource name."""

    node: str

    def ssh_keys(self, google: GoogleClient) -> str:
        return self._metadata(google).get("ssh-keys", "")

    def add_ssh_key(self, caller: Caller, line: str) -> None:
        metadata = self._metadata(caller.google)
        lines = [*metadata.get("ssh-keys", "").splitlines(), line]
        body = {"metadata": metadata | {"ssh-keys": "\n".join(filter(None, lines))}}
        operation = caller.google.call(
            tpu_nodes.API, "projects.locations.nodes.patch", name=self.node, updateMask="metadata", body=body
        )
        wait_rpc(caller, tpu_nodes.API, operation, "projects.locations.operations.get")

    def guest_attributes(self, google: GoogleClient) -> Sequence[Sequence[dict[str, str]]]:
        """See https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/getGuestAttributes."""
        method = "projects.locations.nodes.getGuestAttributes"
        answer = google.call(tpu_nodes.API, method, name=self.node, body={"workerIds": [""]})
        return [worker.get("queryValue", {}).get("items", []) for worker in answer.get("guestAttributes", [])]

    def _metadata(self, google: GoogleClient) -> dict[str, Any]:
        return dict(google.call(tpu_nodes.API, "projects.locations.nodes.get", name=self.node).get("metadata", {}))

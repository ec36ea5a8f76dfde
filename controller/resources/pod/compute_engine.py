"""Compute Engine as a plane: slices that are instances, or groups of them; and what it can tell before one is made.

Its pools of quota are per region, apart from those of the TPU API.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from conf.schema.config import Config
from conf.schema.topology import Topology, tpu_type_table
from controller.context import Context
from controller.core.finding import Issue
from controller.gcp.answers import MARK, leaf, parse_timestamp
from controller.gcp.google_errors import ForbiddenError, NotFoundError, ServiceDisabledError
from controller.resources.pod import instance_bodies
from controller.resources.pod.instance_bodies import MAX_RUN_MARGIN_SECONDS, max_run_seconds, slice_spec
from controller.resources.pod.instance_groups import (
    API,
    GroupProvisioner,
    InstanceProvisioner,
    InstanceVms,
    change,
    delete_part,
    read_group,
)
from controller.resources.pod.instance_states import ENDED, ENDING, is_tpu, parse_group, parse_instance, place_of
from controller.resources.pod.plane import CONSOLE, Leftover, PlaneChecks, PlaneMethods, is_of_run
from controller.resources.pod.provisioner import Place, Provisioner, ProvisionerName, SliceSpec, SliceStatus
from controller.resources.pod.refusals import PlaneAdvice, no_listing, quota_metrics, zone_key
from controller.ssh.login import WorkerVms

IMAGE_PROJECT = instance_bodies.IMAGES.split("/")[1]
FLEX_SECONDS = 7 * 24 * 3600
"""Longest life of a flex-start pod: https://cloud.google.com/compute/docs/instances/about-flex-start-vms."""


class ComputeEngineChecks:
    """Implements `PlaneChecks`."""

    def offers(self, topology: Topology) -> bool:
        return bool(topology.image_family and topology.machine_type)

    def obstacles(self, config: Config) -> Iterator[Issue]:
        topology, tpu, generations = config.topology, config.tpu, tpu_type_table()["generations"]
        if not topology.image_family:
            others = ", ".join(name for name, facts in generations.items() if facts["image_family"])
            message = f"Compute Engine has no {topology.generation}; set it to auto or tpu_api, or choose {others}"
            yield Issue(message, "tpu.plane")
        elif not topology.machine_type:
            machines = ", ".join(generations[topology.generation]["machine_types"].values())
            message = f"Compute Engine has no VM type for {tpu.accelerator_type}; it has {machines}"
            yield Issue(message, "tpu.accelerator_type")
        if tpu.provisioner != "auto":
            message = f"{tpu.provisioner} is a way of the TPU API; set it to auto, or tpu.plane to tpu_api"
            yield Issue(message, "tpu.provisioner")

    def tier_obstacles(self, config: Config, tier: str) -> Iterator[Issue]:
        if tier == "preemptible":
            yield Issue("Compute Engine has no preemptible TPUs; choose spot", "tpu.capacity")
        if tier == "reserved" and config.tpu.reservation is None:
            yield Issue("tpu.capacity=reserved needs the name of the reservation", "tpu.reservation")
        if tier != "flex_start":
            return
        seconds = max_run_seconds(config)
        if not seconds:
            message = "flex_start needs a duration: set it to at most 168, or set budget.max_hours"
            yield Issue(message, "tpu.max_run_hours")
        elif seconds > FLEX_SECONDS + MAX_RUN_MARGIN_SECONDS:
            message = f"Google ends a flex_start pod after 168 hours, and this is {seconds / 3600:.0f}; set it to at"
            yield Issue(f"{message} most 168", "tpu.max_run_hours")

    def image(self, config: Config) -> Iterator[Issue]:
        """Google does not refuse an image of the TPU API by its name, but does not find it."""
        wanted, documented = config.tpu.runtime_version, config.topology.image_family
        if wanted in (None, documented):
            return
        generation, generations = config.topology.generation, tpu_type_table()["generations"]
        if any(wanted == facts["runtime_version"] for facts in generations.values()):
            message = f"{wanted} is an image of the TPU API; on Compute Engine use {documented}, or null"
            yield Issue(message, "tpu.runtime_version", "error")
        elif config.tpu.plane == "auto" and "/" not in wanted:
            message = f"{wanted} is not known as an image of Compute Engine; set tpu.plane, or use null"
            yield Issue(message, "tpu.runtime_version", "error")
        elif made_for := [name for name, facts in generations.items() if wanted == facts["image_family"]]:
            message = f"{wanted} is an image for {', '.join(made_for)}, not for {generation}; use {documented}, or null"
            yield Issue(message, "tpu.runtime_version", "error")
        else:
            yield Issue(f"{wanted} is not the documented image for {generation}; use {documented}, or null")

    def offered_types(self, config: Config, context: Context) -> Iterator[Issue]:
        wanted = config.topology.machine_type
        for zone in config.tpu.all_zones if wanted else ():  # `obstacles` tells of a slice that has none
            try:
                context.google.call(API, "machineTypes.get", project=context.project, zone=zone, machineType=wanted)
            except NotFoundError:
                show = f"`gcloud compute machine-types list --filter=name={wanted}` lists the zones that have it"
                message = f"Compute Engine offers no {wanted} in {zone}; choose another zone, or set tpu.plane; {show}"
                yield Issue(message, zone_key(config, zone))

    def offered_images(self, config: Config, context: Context) -> Iterator[Issue]:
        """An image of its own project is not looked up: Google rejects a mistyped one at once."""
        documented = config.topology.image_family
        wanted = config.tpu.runtime_version or documented
        if wanted is None or "/" in wanted:
            return
        try:
            context.google.call(API, "images.getFromFamily", project=IMAGE_PROJECT, family=wanted)
        except NotFoundError:
            if wanted == documented:
                yield Issue(f"Google has no image family {wanted}, the documented one", severity="note")
            else:
                listed = f"`gcloud compute images list --project={IMAGE_PROJECT}` lists them"
                yield Issue(f"Google has no image family {wanted} for TPUs; {listed}, or use null")

    def listing(self, config: Config, context: Context) -> Iterator[Issue]:
        zone = config.tpu.zone
        try:
            context.google.call(API, "instances.list", project=context.project, zone=zone, maxResults=1)
        except ForbiddenError as error:
            yield no_listing(zone, "roles/compute.instanceAdmin.v1", error)

    def quota(self, config: Config, context: Context, chips: int | None = None) -> Iterator[Issue]:
        """Yield the pools that a request will draw on: what the TPU API's pools hold is no use there.

        Google does not document that it shows them, so a pool that is not listed is only noted.
        """
        generation = config.topology.generation
        chips = chips or config.topology.chips
        limits = limits_of(context)
        standard, preemptible = _family(config.topology.machine_type), _preemptible(generation)
        pools = {"on_demand": (standard,), "spot": (preemptible,), "flex_start": (preemptible, standard)}
        wanted = [(region, tier) for region in config.regions for tier in config.tpu.capacity if tier in pools]
        known = {place: [limits.get((pool, place[0])) for pool in pools[place[1]]] for place in wanted}
        short = {place: found for place, found in known.items() if all(n is not None and n < chips for n in found)}
        held = chips_of_others(config, context)
        for region, tier in wanted:
            found = known[region, tier]
            names = " and then ".join(
                pool.upper() if pool.startswith("preemptible") else f"TPUS_PER_TPU_FAMILY ({pool})"
                for pool in pools[tier]
            )
            what = f"{config.tpu.accelerator_type} {tier} draws on Compute Engine's quota {names} in {region}"
            if (region, tier) in short:
                most = max(limit for limit in found if limit is not None)
                yield Issue(
                    f"{what}, which is {most:.0f}, and {chips} are needed; that of the TPU API does not count. Request "
                    "more (https://console.cloud.google.com/iam-admin/quotas), or change tpu.capacity, tpu.zone or "
                    "tpu.plane",
                    severity="error" if len(short) == len(wanted) else "warning",
                )
            elif None in found:
                yield Issue(f"{what}, not on the TPU API's; Google does not show how much that is", severity="note")
            else:
                rows = [(limit or 0.0, held[pool, region]) for pool, limit in zip(pools[tier], found, strict=True)]
                limit, others = max(rows, key=lambda row: row[0] - row[1])
                amount = "unlimited" if limit == float("inf") else f"{limit:.0f}"
                if limit - others < chips:
                    why = f"other VMs of the project hold {others} of it; {chips} are needed"
                    yield Issue(f"{what}, which is {amount}, and {why}", severity="warning")
                elif config.tpu.plane == "auto":
                    yield Issue(f"{what}, which is {amount}", severity="note")


TPU_MACHINES = 'name eq "[ct][tp]u?[0-9].*"'
"""Filter of machine types with TPUs, such as ct6e-standard-4t and tpu7x-standard-4t."""


def quota_pool(generation: str, machine_type: str, tier: str) -> str:
    """Return the pool that VMs on demand or spot draw on."""
    return _family(machine_type) if tier == "on_demand" else _preemptible(generation)


def _family(machine_type: str) -> str:
    """Return the value of the dimension `tpu_family` of the standard quota: CT6E of ct6e-standard-4t."""
    return machine_type.partition("-")[0].upper()


def _preemptible(generation: str) -> str:
    return f"preemptible_tpu_{generation.removeprefix('tpu')}"


def chips_of_others(config: Config, context: Context) -> Counter[tuple[str, str]]:
    """Return the chips of VMs other than a run's, by pool of quota and region."""
    held, generations = Counter[tuple[str, str]](), tpu_type_table()["generations"]
    machines = {
        machine: (name, chips)
        for name, facts in generations.items()
        for chips, machine in facts["machine_types"].items()
    }
    for zone, item in aggregated(context, "instances"):
        machine = leaf(item.get("machineType", ""))
        generation, chips = machines.get(machine, ("", 0))
        tier = place_of(item, "instance").capacity
        gone = item.get("status", "") in ("PENDING", *ENDING, *ENDED)
        if not chips or tier == "reserved" or gone or is_of_run(config, item["name"]):
            continue
        held[quota_pool(generation, machine, tier), zone.rpartition("-")[0]] += chips
    return held


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


MIG, GROUP, INSTANCE = "mig", "compute instanceGroupManagers.", "compute instances."
OPERATIONS = tuple(f"compute {scope}Operations.{verb}" for scope in ("zone", "region") for verb in ("get", "wait"))
METHODS = PlaneMethods(
    check=(
        "compute machineTypes.get", f"{INSTANCE}list", f"{INSTANCE}aggregatedList", "compute images.getFromFamily"),
    observe=(
        f"{GROUP}get", f"{GROUP}listManagedInstances", f"{INSTANCE}get", f"{INSTANCE}list",
        f"{INSTANCE}getGuestAttributes"),
    own=(
        "compute resourcePolicies.insert", "compute resourcePolicies.list", "compute resourcePolicies.delete",
        "compute regionInstanceTemplates.insert", "compute regionInstanceTemplates.list",
        "compute regionInstanceTemplates.delete", f"{GROUP}insert", f"{GROUP}resize", f"{GROUP}delete",
        f"{INSTANCE}insert", f"{INSTANCE}delete", "compute.instances.setLabels", "compute.instances.setMetadata",
        "compute.instances.setServiceAccount", "compute.instances.setTags", *OPERATIONS),
    change=(f"{INSTANCE}setMetadata", f"{INSTANCE}start", f"{INSTANCE}stop"),
    add_key=(f"{INSTANCE}setMetadata", "compute zoneOperations.wait"),
)  # fmt: skip
LEFTOVERS = MappingProxyType({
    "instance template": "regionInstanceTemplates",
    "workload policy": "resourcePolicies",
})  # fmt: skip
"""Collections by kind."""
Item = dict[str, Any]


class ComputeEngine:
    """Implements `Plane`."""

    title: ClassVar[str] = "Compute Engine"
    queues: ClassVar[frozenset[ProvisionerName]] = frozenset({MIG})
    account_roles: ClassVar[tuple[str, ...]] = ("roles/compute.instanceAdmin.v1",)
    methods: ClassVar[PlaneMethods] = METHODS
    checks: ClassVar[PlaneChecks] = ComputeEngineChecks()
    advice: ClassVar[PlaneAdvice] = PlaneAdvice(
        role="roles/compute.instanceAdmin.v1",
        types="gcloud compute machine-types list --zones=ZONE --filter='name~^ct OR name~^tpu'",
        images=f"gcloud compute images list --project={IMAGE_PROJECT}",
        more={"quota": "the quota of the TPU API does not count here"},
        wishes=instance_bodies.WISHES,
    )

    def delete_permission(self, provisioner: ProvisionerName) -> str:
        return "compute.instanceGroupManagers.delete" if provisioner == MIG else "compute.instances.delete"

    def spec(self, config: Config) -> SliceSpec:
        return slice_spec(config)

    def provisioner_for(self, config: Config, tier: str) -> ProvisionerName:
        return MIG if config.topology.workers > 1 else "instance"

    def provisioners(self, create_seconds: float) -> Mapping[ProvisionerName, Provisioner]:
        return {MIG: GroupProvisioner(create_seconds), "instance": InstanceProvisioner(create_seconds)}

    def slices(self, context: Context) -> Iterator[SliceStatus]:
        by_zone: dict[str, list[Item]] = {}
        for zone, item in aggregated(context, "instances"):
            if is_tpu(leaf(item.get("machineType", ""))):
                by_zone.setdefault(zone, []).append(item)
        grouped: set[tuple[str, str]] = set()
        for zone, manager in aggregated(context, "instanceGroupManagers"):
            there, base = by_zone.get(zone, []), manager.get("baseInstanceName", manager["name"])
            ours = manager.get("description") == instance_bodies.mark(manager["name"])
            if not ours and not any(item["name"].startswith(f"{base}-") for item in there):
                continue  # a group of other machines
            try:
                status = parse_group(read_group(context, manager, zone, there), zone)
            except NotFoundError:
                continue  # it has just been deleted
            grouped |= {(zone, vm) for vm in status.vms}
            yield status
        for zone, items in by_zone.items():
            yield from (parse_instance(item) for item in items if (zone, item["name"]) not in grouped)

    def leftovers(self, context: Context) -> Iterator[Leftover]:
        groups = aggregated(context, "instanceGroupManagers")
        used = {(zone.rpartition("-")[0], group.get("description", "")) for zone, group in groups}
        policies = [(region, item) for region, item in aggregated(context, "resourcePolicies") if _is_ours(item)]
        regions = dict.fromkeys(region for region, _ in policies)  # a policy is made first and deleted last
        templates = [
            (region, item)
            for region in regions
            for item in context.google.list_all(
                API, "regionInstanceTemplates.list", "items", project=context.project, region=region
            )
        ]
        for kind, found in (("instance template", templates), ("workload policy", policies)):
            for region, item in found:
                if _is_ours(item) and (region, item["description"]) not in used:
                    yield Leftover(kind, item["name"], region, parse_timestamp(item.get("creationTimestamp")))

    def delete_leftover(self, context: Context, leftover: Leftover) -> None:
        if leftover.kind in LEFTOVERS:
            delete_part(context, LEFTOVERS[leftover.kind], leftover.name, leftover.region)

    def vms(self, context: Context, name: str, status: SliceStatus) -> WorkerVms:
        names = tuple(endpoint.vm for endpoint in status.endpoints)
        return InstanceVms(context.project, status.place.zone, names)

    def deletions(self, context: Context, name: str, zone: str) -> list[str]:
        return instance_bodies.deletions(context, name, zone)

    def console_url(self, project: str, name: str, place: Place) -> str:
        page = f"instancesDetail/zones/{place.zone}/instances"
        if place.provisioner == MIG:
            page = f"instanceGroups/details/{place.zone}"
        return f"{CONSOLE}/{page}/{name}?project={project}"

    def delete_by_hand(self, context: Context, name: str, zone: str) -> None:
        """Delete the VMs; those of a group together, since Google deletes no part of a slice."""
        for way, provisioner in self.provisioners(0.0).items():
            found = provisioner.observe(context, name, zone)
            if found is None or not found.endpoints:
                continue
            if way == MIG:
                change(context, "instanceGroupManagers.resize", zone=zone, instanceGroupManager=name, size=0)
            else:
                change(context, "instances.delete", zone=zone, instance=name)
            return

    def request_service_agent(self, context: Context, zone: str) -> None:
        """Do nothing: Compute Engine makes its accounts when its API is enabled."""

    def cannot_stop(self, name: str, spec: SliceSpec, place: Place) -> str:
        if spec.workers > 1:
            return f"Slipway can stop only pods with one VM, and {name} has {spec.workers}"
        if place.capacity != "on_demand":
            return f"Slipway does not stop {place.capacity} pods; `slipway down` deletes it"
        return ""

    def start(self, context: Context, name: str, zone: str, seconds: float) -> None:
        change(context, "instances.start", seconds, zone=zone, instance=name)

    def stop(self, context: Context, name: str, zone: str, seconds: float) -> None:
        change(context, "instances.stop", seconds, zone=zone, instance=name)


def _is_ours(item: Item) -> bool:
    return item.get("description", "").startswith(f"{MARK} for ")


def aggregated(context: Context, collection: str, **parameters: Any) -> Iterator[tuple[str, Item]]:
    """Yield every item of a collection with its zone or region; none where the API is off or hidden."""
    parameters |= {"project": context.project}
    while True:
        try:
            answer = context.google.call(API, f"{collection}.aggregatedList", **parameters)
        except ServiceDisabledError:
            return
        except ForbiddenError as error:
            if collection not in context.permission_denied:
                context.permission_denied.add(collection)
                what = "for pods" if collection != "machineTypes" else "at the machine types"
                context.events.note("project", f"cannot look {what} of Compute Engine: {error.message}")
                context.google.unlisted.add(collection)
            return
        for scope, listed in answer.get("items", {}).items():
            yield from ((leaf(scope), item) for item in listed.get(collection, []))
        if not answer.get("nextPageToken"):
            return
        parameters["pageToken"] = answer["nextPageToken"]

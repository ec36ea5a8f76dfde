"""Compute Engine as a plane: slices that are instances, or groups of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from conf.schema.config import Config
from controller.context import Context
from controller.gcp.errors import ForbiddenError, NotFoundError, ServiceDisabledError
from controller.gcp.names import MARK, leaf
from controller.gcp.timestamps import parse_timestamp
from controller.gcp.worker_vms import WorkerVms
from controller.resources.pod.compute_engine import bodies
from controller.resources.pod.compute_engine.bodies import slice_spec
from controller.resources.pod.compute_engine.instances import (
    API,
    GroupProvisioner,
    InstanceProvisioner,
    InstanceVms,
    change,
    delete_part,
    read_group,
)
from controller.resources.pod.compute_engine.offers import ComputeEngineChecks, advised_reservations
from controller.resources.pod.compute_engine.states import is_tpu, parse_group, parse_instance
from controller.resources.pod.plane import CONSOLE, CalendarOffer, Leftover, PlaneChecks, PlaneMethods
from controller.resources.pod.provisioner import Place, Provisioner, ProvisionerName, SliceSpec, SliceStatus
from controller.resources.pod.refusals import PlaneAdvice

MIG, GROUP, INSTANCE = "mig", "compute instanceGroupManagers.", "compute instances."
OPERATIONS = ("compute zoneOperations.get", "compute zoneOperations.wait", "compute regionOperations.wait")
METHODS = PlaneMethods(
    check=("compute machineTypes.get", f"{INSTANCE}list"),
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
    calendar=("compute advice.calendarMode",),
)  # fmt: skip
LEFTOVERS = MappingProxyType({
    "instance template": "regionInstanceTemplates",
    "workload policy": "resourcePolicies",
})  # fmt: skip
"""Collections by kind."""
Item = dict[str, Any]

CHECKS = ComputeEngineChecks()
ADVICE = PlaneAdvice(
    role="roles/compute.instanceAdmin.v1",
    types="gcloud compute machine-types list --zones=ZONE --filter='name~^ct OR name~^tpu'",
    images="gcloud compute images list --project=ubuntu-os-accelerator-images",
    more={"quota": "the quota of the TPU API does not count here"},
)


@dataclass(frozen=True)
class ComputeEngine:
    """Implements `Plane`."""

    title: str = "Compute Engine"
    queues: frozenset[ProvisionerName] = frozenset({MIG})
    account_roles: tuple[str, ...] = ("roles/compute.instanceAdmin.v1",)
    methods: PlaneMethods = METHODS
    checks: PlaneChecks = CHECKS
    advice: PlaneAdvice = ADVICE

    def delete_permission(self, provisioner: ProvisionerName) -> str:
        return "compute.instanceGroupManagers.delete" if provisioner == MIG else "compute.instances.delete"

    def spec(self, config: Config) -> SliceSpec:
        return slice_spec(config)

    def provisioner_for(self, config: Config, tier: str) -> ProvisionerName:
        return MIG if config.topology.workers > 1 else "instance"

    def provisioners(self, create_seconds: float) -> Mapping[ProvisionerName, Provisioner]:
        return {MIG: GroupProvisioner(), "instance": InstanceProvisioner()}

    def slices(self, context: Context) -> Iterator[SliceStatus]:
        by_zone: dict[str, list[Item]] = {}
        for zone, item in _aggregated(context, "instances"):
            if is_tpu(leaf(item.get("machineType", ""))):
                by_zone.setdefault(zone, []).append(item)
        grouped: set[tuple[str, str]] = set()
        for zone, manager in _aggregated(context, "instanceGroupManagers"):
            there, base = by_zone.get(zone, []), manager.get("baseInstanceName", manager["name"])
            ours = manager.get("description") == bodies.mark(manager["name"])
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
        groups = _aggregated(context, "instanceGroupManagers")
        used = {(zone.rpartition("-")[0], group.get("description", "")) for zone, group in groups}
        policies = [(region, item) for region, item in _aggregated(context, "resourcePolicies") if _is_ours(item)]
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

    def calendar_offers(self, config: Config, context: Context, days: float) -> Iterator[CalendarOffer]:
        yield from advised_reservations(config, context, days)

    def vms(self, context: Context, name: str, status: SliceStatus) -> WorkerVms:
        names = tuple(endpoint.vm for endpoint in status.endpoints)
        return InstanceVms(context.project, status.place.zone, names)

    def deletions(self, context: Context, name: str, zone: str) -> list[str]:
        return bodies.deletions(context, name, zone)

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
        change(context, "instances.start", zone=zone, instance=name)

    def stop(self, context: Context, name: str, zone: str, seconds: float) -> None:
        change(context, "instances.stop", zone=zone, instance=name)


def _is_ours(item: Item) -> bool:
    return item.get("description", "").startswith(f"{MARK} for ")


def _aggregated(context: Context, collection: str) -> Iterator[tuple[str, Item]]:
    """Yield every item of a collection with its zone or region; none where the API is off or hidden."""
    parameters: dict[str, Any] = {"project": context.project}
    while True:
        try:
            answer = context.google.call(API, f"{collection}.aggregatedList", **parameters)
        except ServiceDisabledError:
            return
        except ForbiddenError as error:
            if collection not in context.permission_denied:
                context.permission_denied.add(collection)
                context.events.note("project", f"cannot look for pods of Compute Engine: {error.message}")
            return
        for scope, listed in answer.get("items", {}).items():
            yield from ((leaf(scope), item) for item in listed.get(collection, []))
        if not answer.get("nextPageToken"):
            return
        parameters["pageToken"] = answer["nextPageToken"]

"""What VMs with TPUs are made from: images, workload policies and regional instance templates; and their refusals.

The refusals use the words that users of the real Compute Engine have seen.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from controller.localcloud.apis.catalog import load_catalog, topologies, tpu_machine
from controller.localcloud.apis.compute_engine.collections import POLICIES, TEMPLATES, Rules
from controller.localcloud.apis.networks import COMPUTE_KIND, invalid_field
from controller.localcloud.apis.service import Service
from controller.localcloud.faults.faults import Words
from controller.localcloud.http.call import PROJECT, PROJECT_NUMBER, ApiCall
from controller.localcloud.http.errors import ApiError, not_found, quota_exceeded
from controller.localcloud.store import Document

_FAMILIES = {
    "ubuntu-os-accelerator-images": r"ubuntu-accel-\d{4}-amd64-tpu-[-a-z0-9]+",
    "debian-cloud": r"debian-\d+",
    "ubuntu-os-cloud": r"ubuntu-(minimal-)?\d{4}-lts(-[a-z0-9]+)?",
}
"""Pattern of the known families of a project. Their names change too often for a list."""
IMAGE_GB = 10
_IMAGE = re.compile(
    r"(?:.*/)?projects/([^/]+)/(?:global|zones/[^/]+)/(?:images/family|imageFamilyViews|images)/([^/]+)"
)


@dataclass(eq=False)
class Parts(Service):
    """Images, and the rules of policies and templates."""

    methods: ClassVar = {"compute.v1:": "images.getFromFamily autoscalers.list autoscalers.aggregatedList"}

    def _images_get_from_family(self, call: ApiCall) -> Document:
        project, family = call.path["project"], call.path["family"]
        if not re.fullmatch(_FAMILIES.get(project, "(?!)"), family):
            raise not_found(f"projects/{project}/global/images/family/{family}")
        image = {"name": f"{family}-v20261101", "family": family, "status": "READY", "diskSizeGb": str(IMAGE_GB)}
        return {**image, "selfLink": f"{self.root}projects/{project}/global/images/{image['name']}"}

    def _autoscalers_list(self, _: ApiCall) -> Document:
        return {}

    _autoscalers_aggregated_list = _autoscalers_list

    def rules(self) -> dict[str, Rules]:
        return {
            POLICIES.plural: Rules(
                prepare=self._prepare_policy,
                users=self._groups_with,
                show=lambda _, __, shown: shown.update(kind="compute#resource_policies"),
            ),
            TEMPLATES.plural: Rules(prepare=_prepare_template, users=self._groups_with, show=self._show_template),
        }

    def find(self, reference: Any, plural: str, field: str, region: str) -> tuple[str, Document]:
        """Return path and document of a regional resource named by URL; raise ApiError 400 or 404."""
        text = str(reference)
        found = re.search(
            rf"(?:projects/(?P<project>[^/]+)/)?regions/(?P<region>[^/]+)/{plural}/(?P<name>[^/]+)$", text
        )
        if found is None:
            raise invalid_field(field, text, "The URL is malformed.")
        path = f"projects/{PROJECT}/regions/{found['region']}/{plural}/{found['name']}"
        if found["project"] not in (None, PROJECT, PROJECT_NUMBER):
            raise not_found(text[text.find("projects/") :])
        document = self.store.get(COMPUTE_KIND, path)
        if document is None:
            raise not_found(path)
        if found["region"] != region:
            raise invalid_field(field, text, f"The resource must be in region '{region}'.")
        return path, document

    def _prepare_policy(self, _: ApiCall, path: str, body: Document) -> Document:
        given = [field for field in body if field.endswith("Policy")]
        if len(given) != 1:
            raise ApiError(400, "Exactly one policy must be specified in a resource policy.")
        if given != ["workloadPolicy"]:
            raise ApiError(501, f"The emulated cloud has no {given[0]}.")
        policy = body["workloadPolicy"]
        if "type" not in policy:
            raise invalid_field("workloadPolicy.type", "", "The type of the workload policy must be specified.")
        topology, field = policy.get("acceleratorTopology"), "workloadPolicy.acceleratorTopology"
        if topology is not None and "maxTopologyDistance" in policy:
            raise invalid_field(field, topology, "It cannot be used together with maxTopologyDistance.")
        if topology is not None and topology not in topologies(self.catalog):
            raise invalid_field(field, topology, "The accelerator topology is not supported.")
        return {**body, "name": path.rpartition("/")[2], "status": "READY"}

    def _groups_with(self, path: str) -> list[str]:
        items = self.store.items(COMPUTE_KIND, f"projects/{PROJECT}/zones/")
        groups = [(name, group) for name, group in items if "/instanceGroupManagers/" in name]
        parts = {name: (one["instanceTemplate"], one["resourcePolicies"]["workloadPolicy"]) for name, one in groups}
        return [name for name, of_group in parts.items() if path in of_group]

    def _show_template(self, path: str, template: Document, shown: Document) -> None:
        properties = template["properties"]
        cards = [
            {key: f"{self.root}{value}" if str(value).startswith("projects/") else value for key, value in card.items()}
            for card in properties.get("networkInterfaces", ())
        ]
        shown["properties"] = properties | ({"networkInterfaces": cards} if cards else {})


def _prepare_template(_: ApiCall, path: str, body: Document) -> Document:
    properties = body.get("properties")
    if not properties:
        raise invalid_field("properties", "", "The properties of the instance template must be specified.")
    machine = str(properties.get("machineType", ""))
    if not machine or "/" in machine:
        raise invalid_field("properties.machineType", machine, "Must be the name of a machine type, not a URL.")
    if tpu_machine(machine):
        check_tpu_vm(properties, "properties.")
    return {**body, "name": path.rpartition("/")[2]}


def check_vm(properties: Mapping[str, Any], where: str = "", *, disks: bool = True) -> None:
    """Raise ApiError 400 for what every VM needs."""
    scheduling = properties.get("scheduling") or {}
    run = (scheduling.get("maxRunDuration") or {}).get("seconds")
    if scheduling.get("automaticRestart") and scheduling.get("provisioningModel", "STANDARD") != "STANDARD":
        why = "Scheduling must have automaticRestart be false with this provisioning model."
        raise invalid_field(f"{where}scheduling.automaticRestart", "true", why)
    if run and not scheduling.get("instanceTerminationAction"):
        why = "A termination action must be specified with a max run duration."
        raise invalid_field(f"{where}scheduling.instanceTerminationAction", "", why)
    if run and not 30 <= int(run) <= 120 * 86400:
        why = "Max run duration must be between 30 seconds and 120 days."
        raise invalid_field(f"{where}scheduling.maxRunDuration", run, why)
    if disks:
        _check_disks(properties, where)


def check_tpu_vm(properties: Mapping[str, Any], where: str = "") -> None:
    """Raise ApiError 400 for what both a template and an instance with TPUs need."""
    scheduling = properties.get("scheduling") or {}
    run = (scheduling.get("maxRunDuration") or {}).get("seconds")
    if scheduling.get("provisioningModel") == "FLEX_START" and not run:
        why = "Max run duration must be specified with the FLEX_START provisioning model."
        raise invalid_field(f"{where}scheduling.maxRunDuration", "", why)
    check_vm(properties, where)
    if scheduling.get("provisioningModel") == "FLEX_START" and not 600 <= int(run or 0) <= 7 * 86400:
        why = "Max run duration must be between 10 minutes and 7 days with the FLEX_START provisioning model."
        raise invalid_field(f"{where}scheduling.maxRunDuration", run, why)
    if not properties.get("networkInterfaces"):
        raise invalid_field(f"{where}networkInterfaces", "", "At least one network interface is required.")
    affinity = (properties.get("reservationAffinity") or {}).get("consumeReservationType")
    if scheduling.get("provisioningModel") == "RESERVATION_BOUND" and affinity != "SPECIFIC_RESERVATION":
        why = "A specific reservation must be named with the RESERVATION_BOUND provisioning model."
        raise invalid_field(f"{where}reservationAffinity", affinity or "", why)


def _check_disks(properties: Mapping[str, Any], where: str) -> None:
    boots = [disk for disk in properties.get("disks", ()) if disk.get("boot")]
    if not boots:
        raise invalid_field(f"{where}disks", "", "No disks are specified.")
    made = boots[0].get("initializeParams") or {}
    if image := made.get("sourceImage"):
        found = _IMAGE.fullmatch(image)
        if found is None:
            raise invalid_field(f"{where}disks[0].initializeParams.sourceImage", image, "The URL is malformed.")
        project, name = found.groups()
        if not re.fullmatch(f"{_FAMILIES.get(project, '.+')}(-v\\d+)?", name):
            raise not_found(image[image.find("projects/") :])
    elif "source" not in boots[0]:
        why = "A source image or a disk must be specified."
        raise invalid_field(f"{where}disks[0].initializeParams.sourceImage", "", why)
    if int(made.get("diskSizeGb") or IMAGE_GB) < IMAGE_GB:
        size = f"Requested disk size cannot be smaller than the image size ({IMAGE_GB} GB)"
        raise invalid_field(f"{where}disks[0].initializeParams.diskSizeGb", made["diskSizeGb"], size)
    machine, kind = tpu_machine(str(properties["machineType"])), str(made.get("diskType", "")).rpartition("/")[2]
    if machine and machine.generation in load_catalog().hyperdisk and kind.startswith("pd-"):
        family = f"[instance_type: VIRTUAL_MACHINE, family: {machine.family}, created under: compute]"
        raise ApiError(400, f"[{kind}] features and {family} are not compatible for creating instance.")


def check_startable(properties: Mapping[str, Any]) -> None:
    """Raise ApiError 400 for what is only found out as a VM with TPUs is made; a template that lacks it is accepted."""
    if (properties.get("scheduling") or {}).get("onHostMaintenance") != "TERMINATE":
        raise ApiError(400, "Instances with guest accelerators do not support live migration.")
    if properties.get("resourcePolicies"):
        kinds = "VmMaintenancePolicy, GroupPlacementPolicy, InstanceSchedulePolicy"
        raise ApiError(400, f"Resource policy must have one of [{kinds}]")


INTERNAL_ERROR = "Internal error. Please try again or contact Google Support. (Code: '-5708443290156853209')"


def wrong_size(size: int, wanted: int) -> ApiError:
    """Return the refusal of a part of a slice: https://github.com/GoogleCloudPlatform/magic-modules/pull/17153."""
    message = f"Target size should be {wanted} for given accelerator topology but was {size}."
    return ApiError(400, f"Invalid value for field 'operation': ''. {message}")


def words_before_staging(machine: str) -> Words:
    """Return what faults say of a creation of VMs of this type before anything is staged."""
    return partial(_creation_error, machine)


def _creation_error(machine: str, spec: Document, zone: str, capacity: str, kind: str) -> ApiError | None:
    region = zone.rpartition("-")[0]
    match spec["kind"]:
        case "stockout":
            message = (
                f"The zone 'projects/{PROJECT}/zones/{zone}' does not have enough resources available to fulfill the "
                f"request.  '(resource type:compute)'. A {machine} VM instance is currently unavailable in the {zone} "
                "zone. zonesAvailable: ''"  # Google names no other zone
            )
            return ApiError(503, message, status="UNAVAILABLE", reason="ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS")
        case "quota":
            preemptible = capacity in ("spot", "flex_start")
            return quota_exceeded("PREEMPTIBLE_TPUS" if preemptible else "TPUS_PER_TPU_FAMILY", 0, region)
        case "permission":
            return ApiError(403, f"Required 'compute.instances.create' permission for 'projects/{PROJECT}'")
        case "type_denied":
            return ApiError(400, f"This user agent is not allowed to use the machine type {machine}.")
        case "no_reservation":
            return ApiError(400, f"Specified reservations [] do not exist in zone {zone}.")
    return words_after_staging(spec, zone, capacity, kind) if spec["at"] == "request" else None


def words_after_staging(spec: Document, *_: str) -> ApiError | None:
    """Return what a fault says of a creation once its VMs have been staged, or None."""
    match spec["kind"]:
        case "internal":
            return ApiError(500, INTERNAL_ERROR, reason="INTERNAL_ERROR")
        case "failure":
            return ApiError(spec["code"], spec["message"])
    return None

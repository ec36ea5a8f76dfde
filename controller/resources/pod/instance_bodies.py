"""What only Compute Engine needs to know of a slice, and the bodies of the requests that create one.

https://cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.schema.config import Config
from conf.strict_json import dumps
from controller.context import Context
from controller.gcp.answers import LABEL, MARK, TAG
from controller.resources.pod.provisioner import Place, SliceSpec, data_disk_name, node_metadata

MAX_RUN_MARGIN_SECONDS = 600.0
"""By how much Google's own limit on a pod's life exceeds the budget, so that the controller ends the run first."""


@dataclass(frozen=True)
class VmSpec:
    """The VMs of a slice; see `SliceSpec.own`.

    Attributes:
        machine_type: their type.
        shape: the slice's topology, `2x4`.
        max_run_seconds: after how long Google itself deletes them; None: never.
    """

    machine_type: str = ""
    shape: str = ""
    boot_disk_gb: int = 0
    max_run_seconds: float | None = None

    @property
    def compared(self) -> Mapping[str, Any]:
        return {"machine_type": self.machine_type} if self.machine_type else {}


def slice_spec(config: Config) -> SliceSpec:
    """Return the slice that a config asks of Compute Engine."""
    topology = config.topology
    own = VmSpec(topology.machine_type, topology.shape or "", config.tpu.boot_disk_gb, max_run_seconds(config))
    return SliceSpec.of(config, topology.image_family, own)


def vm_spec(spec: SliceSpec) -> VmSpec:
    """Return the part of a spec that `slice_spec` made."""
    assert isinstance(spec.own, VmSpec)
    return spec.own


def max_run_seconds(config: Config) -> float | None:
    """Return after how long Google itself shall delete a pod of Compute Engine; None: never.

    Without tpu.max_run_hours it follows from the budget of the run. A pod of a sweep serves many runs, so there it
    does not.
    """
    tpu, budget, sweep = config.tpu, config.budget, config.sweep
    if tpu.max_run_hours is not None:
        return 3600 * tpu.max_run_hours
    if sweep.params or sweep.cases or sweep.search is not None:
        return None
    spot = tpu.capacity[0] in ("spot", "preemptible")
    price = (
        budget.usd_per_hour if budget.usd_per_hour is not None else config.topology.usd_per_hour(tpu.zone, spot=spot)
    )
    hours = [budget.max_hours] if budget.max_hours is not None else []
    if budget.max_usd is not None and price:
        hours.append(budget.max_usd / price)
    return 3600 * min(hours) + MAX_RUN_MARGIN_SECONDS if hours else None


SCOPE = "https://www.googleapis.com/auth/cloud-platform"
IMAGES = "projects/ubuntu-os-accelerator-images/global/images/family"
IMAGE_KEY = "slipway-image"
"""Key of the VMs' metadata with the image as the config names it: a VM itself only knows its boot disk."""
PROVISIONING_MODELS = {
    "on_demand": "STANDARD",
    "spot": "SPOT",
    "flex_start": "FLEX_START",
    "reserved": "RESERVATION_BOUND",
}
NOTICE_SECONDS = 120
"""How long before a preemption Google warns a spot VM; the only choice besides 0, the default.

https://cloud.google.com/compute/docs/instances/spot (2 October 2026); nothing says which TPU machines have it.
"""
WISHES = {
    "preemptionNoticeDuration": ("spot", r"preemption.?notice"),
    "reservationAffinity": ("flex_start", r"reservation.?affinity"),
}
"""Fields that a request can do without, with the tier that has them and the words in which a refusal names them."""
MAX_VALID_SECONDS, MIN_VALID_SECONDS = 7200, 90
"""Bounds of `requestValidForDuration`."""
MIN_RUN_SECONDS = 600
"""Shortest life of a flex-start VM."""
MAX_PREFIX = 54
"""Characters of a pod's name that fit before the hash in a template's name, and in the names of a group's VMs."""
Body = dict[str, Any]


def instance_body(context: Context, name: str, spec: SliceSpec, place: Place) -> Body:
    """Return a slice of one VM, for `instances.insert`."""
    zone = f"projects/{context.project}/zones/{place.zone}"
    vm = vm_properties(context, name, spec, place)
    boot = vm["disks"][0]["initializeParams"]
    boot["diskType"] = f"{zone}/diskTypes/{boot['diskType']}"
    body: Body = {
        "name": name,
        "description": mark(name),
        **vm,
        "machineType": f"{zone}/machineTypes/{vm_spec(spec).machine_type}",
    }
    if spec.data_disk_gb is not None:
        source = f"{zone}/disks/{data_disk_name(name)}"
        body["disks"].append({"source": source, "mode": "READ_WRITE", "boot": False, "autoDelete": False})
    if place.capacity == "flex_start":
        seconds = min(MAX_VALID_SECONDS, max(MIN_VALID_SECONDS, spec.valid_until_seconds or MAX_VALID_SECONDS))
        body["params"] = {"requestValidForDuration": {"seconds": str(round(seconds))}}
    return body


def policy_body(name: str, spec: SliceSpec) -> Body:
    """Return the workload policy that connects the VMs of a slice, for `resourcePolicies.insert`."""
    shape = vm_spec(spec).shape
    workload = {"type": "HIGH_THROUGHPUT", "acceleratorTopology": shape, "acceleratorTopologyMode": "AUTO_CONNECT"}
    return {"name": policy_name(name, spec), "description": mark(name), "workloadPolicy": workload}


def template_body(context: Context, name: str, spec: SliceSpec, place: Place) -> Body:
    """Return the template of the VMs, for `regionInstanceTemplates.insert`. It is immutable, so its hash names it."""
    body: Body = {"description": mark(name), "properties": vm_properties(context, name, spec, place)}
    digest = hashlib.sha256(dumps(body, sort_keys=True).encode()).hexdigest()
    return {"name": f"{name[:MAX_PREFIX]}-{digest[:8]}", **body}


def group_body(context: Context, name: str, spec: SliceSpec, place: Place, template: str) -> Body:
    """Return the group of the VMs, still empty, for `instanceGroupManagers.insert`."""
    region = f"{context.google.root('compute')}compute/v1/projects/{context.project}/regions/{place.region}"
    return {
        "name": name,
        "description": mark(name),
        "baseInstanceName": name[:MAX_PREFIX],
        "instanceTemplate": f"{region}/instanceTemplates/{template}",
        "targetSize": 0,
        "targetSizePolicy": {"mode": "BULK"},
        "resourcePolicies": {"workloadPolicy": f"{region}/resourcePolicies/{policy_name(name, spec)}"},
        "instanceLifecyclePolicy": {"defaultActionOnFailure": "DO_NOTHING"},
    }


def mark(name: str) -> str:
    """Return the description of each part of a pod: groups, templates and policies have no labels."""
    return f"{MARK} for {name}"


def policy_name(name: str, spec: SliceSpec) -> str:
    return f"{name[:MAX_PREFIX]}-{vm_spec(spec).shape}"


def vm_properties(context: Context, name: str, spec: SliceSpec, place: Place) -> Body:
    """Return what an instance and a template have in common, as a template has it."""
    project = f"projects/{context.project}"
    card: Body = {
        "network": f"{project}/global/networks/{spec.network}",
        "subnetwork": f"{project}/regions/{place.region}/subnetworks/{place.subnetwork}",
    }
    if spec.external_ip:
        card["accessConfigs"] = [{"name": "external-nat", "type": "ONE_TO_ONE_NAT"}]
    boot = {
        "sourceImage": spec.runtime_version if "/" in spec.runtime_version else f"{IMAGES}/{spec.runtime_version}",
        "diskSizeGb": str(vm_spec(spec).boot_disk_gb),
        "diskType": spec.data_disk_kind,
    }
    metadata = node_metadata(context, spec, deletions(context, name, place.zone))
    # the VMs publish their SSH host keys in the guest attributes
    metadata |= {"enable-guest-attributes": "TRUE", IMAGE_KEY: spec.runtime_version}
    properties: Body = {
        "machineType": vm_spec(spec).machine_type,
        "labels": dict(LABEL),
        "tags": {"items": [TAG]},
        "disks": [{"boot": True, "autoDelete": True, "type": "PERSISTENT", "initializeParams": boot}],
        "networkInterfaces": [card],
        "metadata": {"items": [{"key": key, "value": value} for key, value in metadata.items()]},
        "scheduling": scheduling(vm_spec(spec), place.capacity),
        "serviceAccounts": [{"email": context.account_email(spec.service_account), "scopes": [SCOPE]}],
    }
    if place.capacity == "flex_start":  # as in https://cloud.google.com/compute/docs/instances/create-flex-start-vm
        properties["reservationAffinity"] = {"consumeReservationType": "NO_RESERVATION"}
    for wish in spec.without:
        properties.pop(wish, None)
        properties["scheduling"].pop(wish, None)
    if place.capacity == "reserved":
        properties["reservationAffinity"] = {
            "consumeReservationType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [spec.reservation or ""],
        }
    return properties


def scheduling(spec: VmSpec, capacity: str) -> Body:
    """Return the tier, and how Google ends a VM. TPU VMs cannot move to another host, so maintenance terminates them.

    VMs of all tiers but on_demand are deleted when Google ends them: a stopped one would still bill its disk.
    """
    found: Body = {"provisioningModel": PROVISIONING_MODELS[capacity], "onHostMaintenance": "TERMINATE"}
    if capacity == "spot":
        found |= {"automaticRestart": False, "preemptionNoticeDuration": {"seconds": str(NOTICE_SECONDS)}}
    if spec.max_run_seconds is not None:
        found["maxRunDuration"] = {"seconds": str(max(MIN_RUN_SECONDS, round(spec.max_run_seconds)))}
    if capacity != "on_demand" or spec.max_run_seconds is not None:
        found["instanceTerminationAction"] = "DELETE"
    return found


def deletions(context: Context, name: str, zone: str) -> list[str]:
    """Return what to delete, as URLs: a group with all of its VMs, or the VM of a slice that has only one."""
    where = f"{context.google.root('compute')}compute/v1/projects/{context.project}/zones/{zone}"
    return [f"{where}/instanceGroupManagers/{name}", f"{where}/instances/{name}"]

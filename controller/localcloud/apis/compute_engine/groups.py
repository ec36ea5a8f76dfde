"""Managed instance groups whose VMs are one TPU slice: made all at once, deleted together."""

import secrets
import string
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from controller.localcloud.apis.catalog import AcceleratorType, TpuMachine, check_allowed, slice_type, tpu_machine
from controller.localcloud.apis.compute import Compute
from controller.localcloud.apis.compute_engine.bulk import Slices, capacity_tier, errors_of
from controller.localcloud.apis.compute_engine.collections import GROUPS, Rules, parent_of
from controller.localcloud.apis.compute_engine.templates import Parts, check_startable, words_before_staging, wrong_size
from controller.localcloud.apis.networks import COMPUTE_KIND, invalid_field
from controller.localcloud.apis.operations import BULK_INSERT
from controller.localcloud.apis.service import Service
from controller.localcloud.http.call import PROJECT, PROJECT_NUMBER, ApiCall, fingerprint, paginate, timestamp
from controller.localcloud.http.discovery import load_discovery
from controller.localcloud.http.errors import ApiError, not_ready
from controller.localcloud.store import Document

_BULK_ONLY = "MIGs with TPU accelerator topology require BULK mode in target size policy"
_STATES = {"PENDING": "ACTIVATING", "STAGING": "ACTIVATING", "PREEMPTED": "INCOMPLETE"}
"""State of the topology in phases that are not named after it."""
_SETTLED = ("ACTIVE", "ACTIVE_DEGRADED")
_POLICIES = {
    "instanceLifecyclePolicy": {"defaultActionOnFailure": "REPAIR", "forceUpdateOnRepair": "NO"},
    "updatePolicy": {"type": "OPPORTUNISTIC", "minimalAction": "REPLACE"},
}
"""What they say unless they are given."""
_SUFFIX = string.ascii_lowercase + string.digits


@dataclass(eq=False)
class Groups(Service):
    """Methods beside those that all kinds share."""

    methods: ClassVar = {
        "compute.v1:instanceGroupManagers.": "resize listManagedInstances listErrors",
        "compute.v1:": "instanceGroups.list",
    }
    slices: Slices
    parts: Parts
    compute: Compute

    def rules(self) -> dict[str, Rules]:
        end: dict[str, Any] = {"leave": self.slices.leave, "gone": self.slices.remove}
        return {GROUPS.plural: Rules(prepare=self._prepare, effect=self._begin_size, show=self._show, **end)}

    def _prepare(self, call: ApiCall, path: str, body: Document) -> Document:
        zone, region = call.path["zone"], call.path["zone"].rpartition("-")[0]
        if "instanceTemplate" not in body:
            raise invalid_field("instanceTemplate", "", "An instance template must be specified.")
        template, content = self.parts.find(body["instanceTemplate"], "instanceTemplates", "instanceTemplate", region)
        machine = tpu_machine(content["properties"]["machineType"])
        reference = (body.get("resourcePolicies") or {}).get("workloadPolicy")
        if machine is None or reference is None:
            raise ApiError(501, "The emulated cloud has only groups of TPU VMs with a workload policy.")
        policy, chosen = self.parts.find(reference, "resourcePolicies", "resourcePolicies.workloadPolicy", region)
        topology = chosen["workloadPolicy"].get("acceleratorTopology")
        if topology is None:
            raise ApiError(501, "The emulated cloud has only workload policies with an accelerator topology.")
        if (body.get("targetSizePolicy") or {}).get("mode") != "BULK":
            raise ApiError(400, _BULK_ONLY)
        kind = _slice_of(self.slices, machine, topology)
        size = int(body.get("targetSize", 0))
        if size not in (0, kind.vms):
            raise wrong_size(size, kind.vms)
        name = path.rpartition("/")[2]
        return {
            **body,
            "name": name,
            "baseInstanceName": body.get("baseInstanceName", name[:58]),
            "instanceTemplate": template,
            "resourcePolicies": {"workloadPolicy": policy},
            "targetSize": size,
            "zone": zone,
        }

    def _made_of(self, group: Mapping[str, Any]) -> tuple[Document, TpuMachine, AcceleratorType]:
        """Return the properties of the VMs, their machine type and the slice of a group."""
        store = self.store
        template = store.get(COMPUTE_KIND, group["instanceTemplate"]) or {}
        policy = store.get(COMPUTE_KIND, group["resourcePolicies"]["workloadPolicy"]) or {}
        machine = tpu_machine(template["properties"]["machineType"])
        assert machine is not None, "it was checked before the group was stored"
        topology = policy["workloadPolicy"]["acceleratorTopology"]
        return template["properties"], machine, _slice_of(self.slices, machine, topology)

    def _resize(self, call: ApiCall) -> Document:
        path, group = self.compute.find(GROUPS, call)
        size = int(call.required("size"))
        properties, machine, kind = self._made_of(group)
        if size not in (0, kind.vms):
            raise wrong_size(size, kind.vms)
        if self.operations.current_verb(path) in ("insert", "delete"):
            raise not_ready(path)
        if size and not group["targetSize"]:
            tier = capacity_tier(properties.get("scheduling") or {})
            words, zone = words_before_staging(machine.name), group["zone"]
            self.faults.refuse_creation("request", zone, tier, kind.name, words)
        changed = {**group, "targetSize": size}
        self.store.put(COMPUTE_KIND, path, changed)
        operation = self.compute.begin("resize", path)
        if size == 0 and group["targetSize"]:
            self.slices.leave(path)
            self.compute.begin(BULK_INSERT, path, "slice.remove", delay="delete instanceGroupManagers")
        elif size and not group["targetSize"]:
            self._begin_size(path, changed)
        return operation

    def _begin_size(self, path: str, group: Document) -> None:
        """Begin to make the VMs of a group that wants some."""
        if group["targetSize"] == 0 or self.slices.of_owner(path):
            return
        properties, machine, kind = self._made_of(group)
        zone = group["zone"]
        suffixes = ["".join(secrets.choice(_SUFFIX) for _ in range(4)) for _ in range(kind.vms)]
        names = [f"{group['baseInstanceName']}-{suffix}" for suffix in suffixes]
        instances: list[Document] = [{"name": name} for name in names]
        error: ApiError | None = None
        try:
            check_allowed(self.catalog, machine.name, zone)
            check_startable(properties)
            instances = [self._instance(group, path, properties, name) for name in names]
        except ApiError as refusal:  # the request is accepted; what is wrong shows in the managed instances
            error = refusal
        made = self.slices.add(path, machine.name, kind, instances)
        if error is None:
            self.operations.begin(BULK_INSERT, path, "slice.advance")
            return
        for instance_path, _ in self.slices.instances(made):
            self.store.delete(COMPUTE_KIND, instance_path)
        attempt = errors_of(error.reason, error.message)
        self.slices.change(made, phase="INCOMPLETE", attempt=attempt, error=attempt, errorTime=timestamp(time.time()))

    def _instance(self, group: Document, path: str, properties: Document, name: str) -> Document:
        """Return a VM of a group as its template describes it."""
        zone = group["zone"]
        body = {key: value for key, value in properties.items() if key != "description"}
        body["name"] = name
        body["machineType"] = f"projects/{PROJECT}/zones/{zone}/machineTypes/{properties['machineType']}"
        creator = {"created-by": path, "instance-template": group["instanceTemplate"]}
        added = [{"key": key, "value": value.replace(PROJECT, PROJECT_NUMBER, 1)} for key, value in creator.items()]
        items = [*(properties.get("metadata") or {}).get("items", ()), *added]
        return self.networks.prepare_resource("instances", zone, {**body, "metadata": {"items": items}}, "")

    def _list_managed_instances(self, call: ApiCall) -> Document:
        path, group = self.compute.find(GROUPS, call)
        if (found := self.slices.of_owner(path)) is None:
            return {}
        managed = [
            {
                "instance": self.root + instance_path,
                "name": instance_path.rpartition("/")[2],
                "version": {"instanceTemplate": self.root + group["instanceTemplate"]},
                "currentAction": _action(found, instance),
                "targetStatus": "DELETED" if found["phase"] == "DEACTIVATING" else "RUNNING",
                **({"id": instance["id"], "instanceStatus": instance["status"]} if instance else {}),
                **({"lastAttempt": {"errors": found["attempt"]}} if found.get("attempt") else {}),
            }
            for instance_path, instance in self.slices.instances(found)
        ]
        return {"managedInstances": sorted(managed, key=lambda one: one["name"])}

    def _list_errors(self, call: ApiCall) -> Document:
        path, group = self.compute.find(GROUPS, call)
        found = self.slices.of_owner(path)
        if not found or not (attempt := found.get("attempt")):
            return {}
        version = {"instanceTemplate": self.root + group["instanceTemplate"]}
        details = [
            {"action": "CREATING", "instance": self.root + instance_path, "version": version}
            for instance_path, _ in self.slices.instances(found)
        ]
        errors = [{"error": error, "timestamp": found["errorTime"]} for error in attempt["errors"]]
        return {"items": [{**error, "instanceActionDetails": detail} for detail in details for error in errors]}

    def _instance_groups_list(self, call: ApiCall) -> Document:
        """Return the instance groups that belong to the managed ones."""
        groups = [
            {
                "kind": "compute#instanceGroup",
                "name": group["name"],
                "size": len(found["members"]) if (found := self.slices.of_owner(path)) else 0,
                "zone": self.root + parent_of(call),
                "selfLink": self.root + path.replace("/instanceGroupManagers/", "/instanceGroups/"),
            }
            for path, group in self.store.items(COMPUTE_KIND, GROUPS.path(call, ""))
        ]
        return paginate(call, groups)

    def _show(self, path: str, group: Document, shown: Document) -> None:
        found = self.slices.of_owner(path)
        template = self.root + group["instanceTemplate"]
        instances = [instance for _, instance in self.slices.instances(found)] if found else []
        actions = Counter(_camel(_action(found, instance)) for instance in instances) if found else Counter()
        counted = load_discovery().schemas["compute.v1"]["InstanceGroupManagerActionsSummary"]["properties"]
        shown |= {
            "instanceTemplate": template,
            "versions": [{"instanceTemplate": template, "targetSize": {"calculated": group["targetSize"]}}],
            "instanceGroup": self.root + path.replace("/instanceGroupManagers/", "/instanceGroups/"),
            "resourcePolicies": {"workloadPolicy": self.root + group["resourcePolicies"]["workloadPolicy"]},
            "fingerprint": fingerprint(group),
            "listManagedInstancesResults": group.get("listManagedInstancesResults", "PAGELESS"),
            **{name: {**default, **(group.get(name) or {})} for name, default in _POLICIES.items()},
            "currentActions": {name: actions[name] for name in sorted(counted)},
            "status": self._status(group, found, instances),
        }

    def _status(self, group: Document, found: Document | None, instances: list[Document | None]) -> Document:
        """Return the group's `status` with the topology, if the group has had VMs."""
        if found is None:
            return {"isStable": group["targetSize"] == 0, "bulkInstanceOperation": {"inProgress": False}}
        topology: Document = {
            "acceleratorTopology": found["topology"], "state": _STATES.get(found["phase"], found["phase"]),
        }  # fmt: skip
        if found.get("error"):
            topology["stateDetails"] = {"error": found["error"], "timestamp": found["errorTime"]}
        bulk: Document = {"inProgress": found["phase"] in ("PENDING", "STAGING")}
        if found.get("waiting"):
            bulk["lastProgressCheck"] = found["waiting"]
        statuses = Counter(_camel(instance["status"]) if instance else "nonExistent" for instance in instances)
        return {
            "isStable": found["phase"] in _SETTLED,
            "bulkInstanceOperation": bulk,
            **({} if self.faults.standing("topology_hidden") else {"appliedAcceleratorTopologies": [topology]}),
            "currentInstanceStatuses": dict(statuses),
        }


def _action(found: Document, instance: Document | None) -> str:
    """Return what a group does with one of its VMs."""
    if found["phase"] == "DEACTIVATING":
        return "DELETING"
    if found["phase"] in ("PENDING", "STAGING") or (found.get("attempt") and instance is None):
        return "CREATING"
    return "RESTARTING" if found["phase"] == "REACTIVATING" else "NONE"


def _camel(name: str) -> str:
    first, *others = name.lower().split("_")
    return first + "".join(word.capitalize() for word in others)


def _slice_of(slices: Slices, machine: TpuMachine, topology: str) -> AcceleratorType:
    """Return what a slice is made of; raise ApiError 400 for a topology that the machine type cannot make."""
    kind = slice_type(slices.catalog, machine, topology)
    if kind is None or kind.vms < 2:
        why = f"The accelerator topology is not supported by machine type {machine.name}."
        raise invalid_field("resourcePolicies.workloadPolicy", topology, why)
    return kind

"""Instances: those with TPUs, and the methods that only instances have."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from controller.localcloud.apis.catalog import TpuMachine, slice_type, tpu_machine
from controller.localcloud.apis.compute import Compute, show_metadata
from controller.localcloud.apis.compute_engine.bulk import Slices, capacity_tier
from controller.localcloud.apis.compute_engine.collections import INSTANCES, Rules
from controller.localcloud.apis.compute_engine.templates import (
    IMAGE_GB,
    check_startable,
    check_tpu_vm,
    check_vm,
    words_before_staging,
    wrong_size,
)
from controller.localcloud.apis.networks import COMPUTE_KIND, check_sources, invalid_field
from controller.localcloud.apis.operations import BULK_INSERT, Effect
from controller.localcloud.apis.service import Service
from controller.localcloud.http.call import PROJECT, ApiCall, check_fingerprint, fingerprint, timestamp
from controller.localcloud.http.errors import ApiError, not_ready
from controller.localcloud.store import Document

_SHORTEST_WAIT, _LONGEST_WAIT = 90, 7200
"""Bounds of `requestValidForDuration` in seconds; 0 waits for nothing."""
_SHIELDED = {"enableSecureBoot": False, "enableVtpm": True, "enableIntegrityMonitoring": True}


@dataclass(eq=False)
class TpuInstances(Service):
    """Rules of instances, and methods beside those that all kinds share."""

    methods: ClassVar = {"compute.v1:instances.": "stop start setMetadata setLabels getGuestAttributes"}
    slices: Slices
    compute: Compute

    def rules(self) -> dict[str, Rules]:
        begin: dict[str, Any] = {"refuse": self._refuse, "prepare": self._prepare, "effect": self._effect}
        return {INSTANCES.plural: Rules(**begin, show=self._show, leave=self._leave, gone=self.slices.remove)}

    def effects(self) -> dict[str, Effect]:
        return {"instance.stopped": self._on_stopped}

    def _refuse(self, call: ApiCall) -> None:
        machine = self._machine(call.body)
        kind = slice_type(self.catalog, machine, None) if machine else None
        if machine and kind:
            tier, words = capacity_tier(call.body.get("scheduling") or {}), words_before_staging(machine.name)
            self.faults.refuse_creation("request", call.path["zone"], tier, kind.name, words)

    def _prepare(self, call: ApiCall, path: str, body: Document) -> Document | None:
        machine = self._machine(body)
        if machine is None:
            check_vm(body, disks=bool(body.get("disks")))
            return None
        zone = call.path["zone"]
        check_tpu_vm(body)
        check_startable(body)
        check_sources(self.store, body["disks"])
        kind = slice_type(self.catalog, machine, None)
        if kind is None:
            raise ApiError(400, f"Invalid machine type {machine.name} in zone {zone}.")
        waits = capacity_tier(body.get("scheduling") or {}) == "flex_start"
        asked = ((body.get("params") or {}).get("requestValidForDuration") or {}).get("seconds")
        if asked is not None and int(asked) and not _SHORTEST_WAIT <= int(asked) <= _LONGEST_WAIT:
            why = f"Must be 0, or between {_SHORTEST_WAIT} and {_LONGEST_WAIT} seconds."
            raise invalid_field("params.requestValidForDuration", asked, why)
        valid = None if asked is None else int(asked)
        body = {key: value for key, value in body.items() if key != "params"}
        instance = self.networks.prepare_resource("instances", zone, body, path)
        found = self.slices.add(path, machine.name, kind, [instance])
        if waits:
            self.slices.change(found, validUntil=None if valid is None else time.time() + valid)
        elif refusal := self.quotas.short_of_tpus(found["id"]):
            raise refusal
        url = f"projects/{PROJECT}/zones/{zone}/machineTypes/{machine.name}"
        return {**instance, "status": "PENDING" if waits else "PROVISIONING", "machineType": url}

    def _effect(self, path: str, instance: Document) -> str | None:
        """Return the effect of the insertion. A flex-start VM exists, PENDING, before there is capacity for it."""
        if self._machine(instance) is None:
            return "compute.boot"
        if instance["status"] != "PENDING":
            return "slice.advance"
        self.operations.begin(BULK_INSERT, path, "slice.advance")
        return None

    def _leave(self, path: str) -> None:
        found = self.workers.vms.slice_of(path)
        if found is None:
            return
        if self.slices.is_group(found):
            raise wrong_size(len(found["members"]) - 1, len(found["members"]))
        self.slices.leave(path)

    def _show(self, path: str, instance: Document, shown: Document) -> None:
        cards = [
            {**card, **{key: self.root + card[key] for key in ("network", "subnetwork")}}
            for card in instance.get("networkInterfaces", ())
        ]
        items = (instance.get("metadata") or {}).get("items", [])
        if "disks" in instance:
            shown["disks"] = [self._show_disk(path, index, disk) for index, disk in enumerate(instance["disks"])]
        shown |= {
            "networkInterfaces": cards,
            "scheduling": _with_defaults(instance.get("scheduling") or {}),
            "tags": {**instance.get("tags", {}), "fingerprint": fingerprint(instance.get("tags", {}))},
            "shieldedInstanceConfig": {**_SHIELDED, **(instance.get("shieldedInstanceConfig") or {})},
            "metadata": show_metadata(items),
            "labelFingerprint": fingerprint(instance.get("labels", {})),
        }
        if self._machine(instance) is not None:
            shown["machineType"] = self.root + instance["machineType"]
            ends = (self.workers.vms.slice_of(path) or {}).get("ends")
            if ends and instance["status"] == "RUNNING":
                shown["resourceStatus"] = {"scheduling": {"terminationTimestamp": timestamp(ends)}}
            if self.operations.current_verb(path) != "delete":
                shown["status"] = instance["status"]

    def _show_disk(self, path: str, index: int, disk: Document) -> Document:
        """Return a disk as an attached one is shown: what it was made from is no longer told."""
        made = disk.get("initializeParams") or {}
        zone, name = path.partition("/instances/")[0], path.rpartition("/")[2]
        source = disk.get("source") or f"{zone}/disks/{made.get('diskName', name)}"
        return {
            "kind": "compute#attachedDisk",
            "index": index,
            "deviceName": f"persistent-disk-{index}",
            "type": "PERSISTENT",
            "mode": "READ_WRITE",
            **{key: value for key, value in disk.items() if key != "initializeParams"},
            "source": self.root + source[source.find("projects/") :],
            "diskSizeGb": str(made.get("diskSizeGb") or IMAGE_GB),
        }

    def _machine(self, instance: Mapping[str, Any]) -> TpuMachine | None:
        return tpu_machine(str(instance.get("machineType", "")))

    def _stop(self, call: ApiCall) -> Document:
        return self._switch(call, "stop", ("RUNNING", "STOPPING", "TERMINATED"), "STOPPED", "instance.stopped")

    def _start(self, call: ApiCall) -> Document:
        return self._switch(call, "start", ("TERMINATED", "PROVISIONING", "RUNNING"), "PENDING", "slice.advance")

    def _switch(self, call: ApiCall, verb: str, statuses: tuple[str, str, str], phase: str, effect: str) -> Document:
        """Stop or start a TPU VM; `statuses` are those before, meanwhile and afterwards."""
        path, instance = self.compute.find(INSTANCES, call)
        found = self.workers.vms.slice_of(path)
        if found is None:
            raise ApiError(501, "The emulated cloud does this only with TPU VMs.")
        if self.slices.is_group(found):
            raise wrong_size(len(found["members"]) - 1, len(found["members"]))
        before, meanwhile, after = statuses
        if instance["status"] == after:
            return self.compute.begin(verb, path)
        if instance["status"] != before:
            raise not_ready(path)
        self.store.put(COMPUTE_KIND, path, {**instance, "status": meanwhile})
        self.slices.change(found, phase=phase)
        self.store.delete("boot", path)
        return self.compute.begin(verb, path, effect)

    async def _on_stopped(self, path: str) -> None:
        found = self.workers.vms.slice_of(path)
        if found is not None:
            await self.workers.halt(found["id"])
            if instance := self.store.get(COMPUTE_KIND, path):
                self.store.put(COMPUTE_KIND, path, {**instance, "status": "TERMINATED"})

    def _set_metadata(self, call: ApiCall) -> Document:
        path, instance = self.compute.find(INSTANCES, call)
        items = (instance.get("metadata") or {}).get("items", [])
        check_fingerprint(call.body.get("fingerprint"), items, "metadata")
        self.store.put(COMPUTE_KIND, path, {**instance, "metadata": {"items": call.body.get("items", [])}})
        return self.compute.begin("setMetadata", path)

    def _set_labels(self, call: ApiCall) -> Document:
        path, instance = self.compute.find(INSTANCES, call)
        check_fingerprint(call.body.get("labelFingerprint"), instance.get("labels", {}), "label")
        self.store.put(COMPUTE_KIND, path, {**instance, "labels": call.body.get("labels", {})})
        return self.compute.begin("setLabels", path)

    def _get_guest_attributes(self, call: ApiCall) -> Document:
        """Return what a VM has published, by `queryPath` or `variableKey`; 404 before there is any."""
        path, instance = self.compute.find(INSTANCES, call)
        query, key = call.query.get("queryPath", ""), call.query.get("variableKey", "")
        worker = self.workers.vms.of_instance(path) if instance["status"] == "RUNNING" else None
        items = self.workers.guest_attributes(worker) if worker else []
        namespace, _, name = (key or query).strip("/").partition("/")
        items = [item for item in items if namespace in ("", item["namespace"]) and name in ("", item["key"])]
        if not items:
            raise ApiError(404, f"The resource '{key or query}' of type 'Guest Attribute' was not found.")
        link = f"{self.root}{path}/guestAttributes/{query}"
        if key:
            return {"selfLink": link, "variableKey": key, "variableValue": items[0]["value"]}
        return {"selfLink": link, "queryPath": query, "queryValue": {"items": items}}


def _with_defaults(scheduling: Mapping[str, Any]) -> Document:
    """Return a VM's scheduling as it is shown: SPOT is preemptible, and only a standard VM restarts by itself."""
    model = scheduling.get("provisioningModel", "STANDARD")
    default = {"onHostMaintenance": "MIGRATE", "provisioningModel": model, "preemptible": model == "SPOT"}
    return {**default, "automaticRestart": model == "STANDARD", **scheduling}

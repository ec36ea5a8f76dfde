"""The VMs of a slice: they wait for capacity together, are staged, run, and become an accelerator topology.

A single TPU instance is a slice of one VM without a topology of its own.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.localcloud.apis.catalog import AcceleratorType, slice_type
from controller.localcloud.apis.compute_engine.templates import IMAGE_GB, words_after_staging, words_before_staging
from controller.localcloud.apis.networks import COMPUTE_KIND
from controller.localcloud.apis.operations import BULK_INSERT, Effect
from controller.localcloud.apis.service import Service
from controller.localcloud.http.call import timestamp
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Document
from controller.localcloud.vms.hosts import SLICE_KIND, member_path, metadata_attributes, slice_attributes
from controller.localcloud.vms.image import DISK_FILE

PREEMPTED = "compute.instances.preempted"
"""Verb of the operation by which Google takes a VM back."""
_EXPIRED = "compute.instances.terminateOnMaxRunDuration"
"""Verb of the operation that ends a VM after its max run duration; Google does not document its name."""
_RUNNING = ("ACTIVATING", "ACTIVE", "ACTIVE_DEGRADED", "INCOMPLETE")
_POLL_SECONDS = 0.05
_USED_GB = 8
"""What the image takes of a boot disk."""
_TIERS = {"SPOT": "spot", "FLEX_START": "flex_start", "RESERVATION_BOUND": "reserved"}


def capacity_tier(scheduling: Mapping[str, Any]) -> str:
    """Return the capacity tier that a VM's scheduling asks for."""
    return _TIERS.get(scheduling.get("provisioningModel", ""), "spot" if scheduling.get("preemptible") else "on_demand")


@dataclass(eq=False)
class Slices(Service):
    """All slices, by ID, kind `slice`: `owner` is the path of the group, or of the instance that is alone."""

    _timers: set[asyncio.Task[None]] = field(default_factory=set)

    def effects(self) -> dict[str, Effect]:
        return {"slice.advance": self.advance, "slice.remove": self.remove, "slice.stopped": self.on_stopped}

    def of_owner(self, owner: str) -> Document | None:
        return next((found for _, found in self.store.items(SLICE_KIND) if found["owner"] == owner), None)

    def add(self, owner: str, machine: str, kind: AcceleratorType, instances: Sequence[Document]) -> Document:
        """Store a slice of these instances, in the order of the workers; those of a group too, all PENDING."""
        uid = str(self.store.next_number("node", 4_000_000_000))
        first = instances[0]
        made: Document = {
            "id": uid,
            "owner": owner,
            "zone": owner.split("/")[3],
            "machine": machine,
            "chips": kind.chips,
            "acceleratorType": kind.name,
            "topology": kind.topology or "",
            "tier": capacity_tier(first.get("scheduling") or {}),
            "phase": "PENDING",
            "since": time.time(),
            "members": [instance["name"] for instance in instances],
            "opens": 0.0,
        }
        self.store.put(SLICE_KIND, uid, made)
        for index, instance in enumerate(instances if self.is_group(made) else ()):
            once = {"id": str(self.store.next_number("id", 10**18)), "creationTimestamp": timestamp(time.time())}
            self.store.put(COMPUTE_KIND, member_path(made, index), {**once, **instance, "status": "PENDING"})
        return made

    def kind(self, found: Document) -> AcceleratorType:
        kind = slice_type(self.catalog, self.catalog.machines[found["machine"]], found["topology"] or None)
        assert kind is not None, "it was checked before the slice was stored"
        return kind

    def is_group(self, found: Document) -> bool:
        return "/instanceGroupManagers/" in found["owner"]

    def instances(self, found: Document) -> list[tuple[str, Document | None]]:
        """Return path and document of each member by worker; None where there is no instance."""
        paths = [member_path(found, index) for index in range(len(found["members"]))]
        return [(path, self.store.get(COMPUTE_KIND, path)) for path in paths]

    def change(self, found: Document, **fields: Any) -> Document:
        """Change a slice, unless it has been deleted in the meantime; return it."""
        current = self.store.get(SLICE_KIND, found["id"])
        changed = {**(current or found), **fields}
        if current is not None:
            self.store.put(SLICE_KIND, found["id"], changed)
        return changed

    async def advance(self, owner: str) -> float | None:
        """Take the next step towards a running slice; return the seconds until the one after, or None at the end."""
        steps = {"PENDING": self._allocate, "STAGING": self._boot, "ACTIVATING": self._activate}
        found = self.of_owner(owner)
        return await steps[found["phase"]](found) if found and found["phase"] in steps else None

    async def _allocate(self, found: Document) -> float | None:
        """Take quota and capacity for all VMs at once, or wait for them."""
        zone, tier = found["zone"], found["tier"]
        words = words_before_staging(found["machine"])
        until = found.get("validUntil")
        expired = until is not None and time.time() > until
        try:
            self.faults.refuse_creation("operation", zone, tier, found["acceleratorType"], words)
            if shortage := self.quotas.short_of_tpus(found["id"]):
                if self._waits(found) and not expired:  # Google says nothing: it looks like a zone without capacity
                    return self._wait(found, None)
                raise shortage
            if self.is_group(found) and (shortage := self.quotas.exhausted_in(zone.rpartition("-")[0])):
                raise shortage
        except ApiError as error:
            exhausted = error.reason in ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "QUOTA_EXCEEDED")
            if exhausted and self._waits(found) and not expired:
                return self._wait(found, error)
            return await self._fail(found, error)
        self._move(found, "STAGING", "STAGING", waiting=None)
        return self.settings.delay("staging", found["owner"])

    def _waits(self, found: Document) -> bool:
        return self.is_group(found) or found["tier"] == "flex_start"

    def _wait(self, found: Document, error: ApiError | None) -> float:
        progress: Document = {"timestamp": timestamp(time.time())}
        if error:
            progress["error"] = errors_of(error.reason, error.message)
        self.change(found, waiting=progress)
        return max(self.settings.delay("another look for capacity"), _POLL_SECONDS)

    async def _boot(self, found: Document) -> float | None:
        """Boot the VMs; they are RUNNING before sshd answers."""
        where = (found["zone"], found["tier"], found["acceleratorType"])
        try:
            self.faults.refuse_creation("operation", *where, words_after_staging)
        except ApiError as error:
            return await self._fail(found, error)
        await self._start(found, self.faults.take("slice_creation") if self.is_group(found) else None)
        return self.settings.delay("topology", found["owner"]) if self.is_group(found) else self._ready(found)

    async def _start(self, found: Document, failure: Document | None) -> None:
        """Boot the VMs of a slice that has its machines, all but the one that a failure keeps down."""
        kind, uid = self.kind(found), found["id"]
        workers = await self.workers.boot(uid, kind.vms, kind, self.faults.worker_without_chip())
        missing = failure["worker"] if failure and failure["state"] == "INCOMPLETE" else None
        now = time.time()
        with self.store.transaction():
            for worker, (path, instance) in zip(workers, self.instances(found), strict=True):
                if instance is not None:
                    told = {**metadata_attributes(instance), **slice_attributes(found, worker.index)}
                    items = [{"key": key, "value": value} for key, value in told.items()]
                    booted = {**_with_address(instance, worker.address), "metadata": {"items": items}}
                    booted["status"] = "TERMINATED" if worker.index == missing else "RUNNING"
                    self.store.put(COMPUTE_KIND, path, {**booted, "lastStartTimestamp": timestamp(now)})
                    # Leave a VM with a small boot disk what the image does not take of it
                    boot = next((disk for disk in instance.get("disks", ()) if disk.get("boot")), {})
                    size = int((boot.get("initializeParams") or {}).get("diskSizeGb") or IMAGE_GB)
                    if size < 100:
                        (self.workers.home(worker).parent / DISK_FILE).write_text(str(max(0, size - _USED_GB)))
            longest = self.scheduled_seconds(found, "maxRunDuration")  # counts from each start
            phase, ends = "ACTIVATING" if self.is_group(found) else "ACTIVE", now + longest if longest else None
            opens = now + self.settings.delay("boot to SSH", found["owner"])
            found = self.change(found, phase=phase, opens=opens, failure=failure, error=None, ends=ends)
        self._arm(found)
        await self.workers.settle()
        await self.workers.run_startup_scripts(uid)

    async def _activate(self, found: Document) -> None:
        failure = found.get("failure")
        if failure is None:
            self._ready(self.change(found, phase="ACTIVE"))
        else:
            await self.fall(found, failure["state"], failure["worker"], failure["message"])

    def scheduled_seconds(self, found: Document, name: str) -> int:
        """Return a duration that the scheduling of the VMs sets, or 0 without it."""
        _, instance = self.instances(found)[0]
        duration = ((instance or {}).get("scheduling") or {}).get(name) or {}
        return int(duration.get("seconds") or 0)

    def _arm(self, found: Document) -> None:
        if found.get("ends"):
            self.store.start_task(self._timers, self._expire(found["id"], found["ends"]), "max run")

    async def _expire(self, uid: str, ends: float) -> None:
        await asyncio.sleep(max(0.0, ends - time.time()))
        found = self.store.get(SLICE_KIND, uid)
        if found is not None and found.get("ends") == ends and found["phase"] in _RUNNING:
            await self._take(found, "INCOMPLETE", _EXPIRED)

    def resume(self) -> None:
        """Restart the timers of an earlier process."""
        for _, found in self.store.items(SLICE_KIND):
            self._arm(found)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _ready(self, found: Document) -> None:
        now = time.time()
        self.store.put("boot", found["owner"], {"time": now})
        self.faults.on_node_ready(now)

    async def _fail(self, found: Document, error: ApiError) -> None:
        """End a creation: a group keeps its managed instances and their errors, a single instance is gone.

        One that has run before is TERMINATED again.
        """
        if not self.is_group(found):
            if found["opens"]:
                self._move(found, "TERMINATED", "STOPPED")
            else:
                await self.remove(found["owner"])
                self.store.delete(COMPUTE_KIND, found["owner"])
            raise error
        await self.workers.remove(found["id"])
        for path, _ in self.instances(found):
            self.store.delete(COMPUTE_KIND, path)
        errors = errors_of(error.reason, error.message)
        self.change(found, phase="FAILED", error=errors, errorTime=timestamp(time.time()), attempt=errors)

    def _move(self, found: Document, status: str, phase: str, **fields: Any) -> None:
        """Change the status of all VMs and the phase of their slice."""
        with self.store.transaction():
            for path, instance in self.instances(found):
                if instance is not None:
                    self.store.put(COMPUTE_KIND, path, {**instance, "status": status})
            self.change(found, phase=phase, **fields)

    async def remove(self, owner: str) -> None:
        """Delete a slice with its VMs and, if it is a group's, their instances."""
        found = self.of_owner(owner)
        if found is None:
            return
        await self.workers.remove(found["id"])
        with self.store.transaction():
            for path, _ in self.instances(found) if self.is_group(found) else ():
                self.store.delete(COMPUTE_KIND, path)
            self.store.delete(SLICE_KIND, found["id"])
            self.store.delete("boot", owner)
            self.store.delete("notice", found["id"])

    def leave(self, owner: str) -> None:
        """Show that a slice is being deleted, and take no further step with it."""
        if (found := self.of_owner(owner)) is not None:
            self.operations.cancel_for(owner, BULK_INSERT)
            self._move(found, "STOPPING", "DEACTIVATING")
            self.workers.schedule_settle()

    # Faults

    def active(self) -> list[Document]:
        return [found for _, found in self.store.items(SLICE_KIND) if found["phase"] in ("ACTIVE", "ACTIVE_DEGRADED")]

    async def preempt(self, uids: Sequence[str]) -> None:
        """Take back those of the slices that are active; Google repairs none of them."""
        for found in [one for one in self.active() if one["id"] in uids]:
            await self._take(found, "PREEMPTED", PREEMPTED)

    async def _take(self, found: Document, phase: str, verb: str) -> None:
        """End all VMs of a slice on Google's behalf, by an operation of this verb on each."""
        await self._end(found, "STOPPING", phase)
        for path, instance in self.instances(found):
            if instance is not None:
                self.operations.begin(verb, path, "slice.stopped")

    async def _end(self, found: Document, status: str, phase: str) -> None:
        """Take all VMs of a slice down."""
        self._move(found, status, phase)
        self.store.delete("boot", found["owner"])
        await self.workers.halt(found["id"])

    async def restart(self, found: Document, seconds: float) -> None:
        """Take all VMs of a slice down and, after some seconds, up again; a group's topology is REACTIVATING."""
        await self._end(found, "REPAIRING", "REACTIVATING")
        await asyncio.sleep(seconds)
        again = self.store.get(SLICE_KIND, found["id"])
        if again is None or again["phase"] != "REACTIVATING":
            return  # deleted in the meantime
        await self._start(again, None)
        self._ready(self.change(again, phase="ACTIVE"))

    async def fall(self, found: Document, state: str, worker: int, message: str) -> None:
        """Let the topology of an active slice become INCOMPLETE, FAILED or ACTIVE_DEGRADED."""
        error = errors_of("INTERNAL_ERROR", message)
        lost = {"INCOMPLETE": [worker], "FAILED": [*range(len(found["members"]))]}.get(state, [])
        with self.store.transaction():
            for index, (path, instance) in enumerate(self.instances(found)):
                if instance is not None and index in lost:
                    self.store.put(COMPUTE_KIND, path, {**instance, "status": "TERMINATED"})
            self.change(found, phase=state, error=error, errorTime=timestamp(time.time()))
            if lost:
                self.store.delete("boot", found["owner"])
        if lost:
            await self.workers.halt(found["id"], worker if state == "INCOMPLETE" else None)

    async def on_stopped(self, path: str) -> None:
        """End the stop of an instance by its termination action."""
        instance = self.store.get(COMPUTE_KIND, path)
        found = self.workers.vms.slice_of(path)
        if instance is None or found is None:
            return
        if (instance.get("scheduling") or {}).get("instanceTerminationAction") == "DELETE":
            if not self.is_group(found):
                await self.remove(found["owner"])  # first: once the name is free, another slice may have it
            self.store.delete(COMPUTE_KIND, path)
        else:
            now = timestamp(time.time())
            self.store.put(COMPUTE_KIND, path, {**instance, "status": "TERMINATED", "lastStopTimestamp": now})


def errors_of(code: str, message: str) -> Document:
    """Return an error as groups and topologies show it."""
    return {"errors": [{"code": code, "message": message}]}


def _with_address(instance: Document, address: str) -> Document:
    """Return an instance whose first interface has the address at which its VM answers."""
    first, *others = instance["networkInterfaces"]
    first = {**first, "networkIP": address}
    if outside := first.get("accessConfigs"):
        first["accessConfigs"] = [{**config, "natIP": address} for config in outside]
    return {**instance, "networkInterfaces": [first, *others]}

"""Effects of faults on nodes and VMs: preemption, maintenance, bad health, killed and frozen programs."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from controller.localcloud.apis.compute_engine.bulk import Slices
from controller.localcloud.apis.nodes import Nodes
from controller.localcloud.apis.service import Service
from controller.localcloud.faults.faults import FaultAction
from controller.localcloud.faults.spec import KINDS
from controller.localcloud.http.call import timestamp
from controller.localcloud.iam import EXPIRED_KIND, EXPIRED_NAME
from controller.localcloud.store import Document
from controller.localcloud.vms.image import CLOCK_FILE, DISK_FILE, EmulatedWorker, first_chip, process_marker
from controller.localcloud.vms.processes import MARKER, Client, kill_client, set_disk_full, signal_programs


@dataclass(eq=False)
class FaultEffects(Service):
    """What faults do; `peers` returns the clients of the laptop's latest requests, newest last."""

    nodes: Nodes
    slices: Slices
    peers: Callable[[], list[Client]]

    def actions(self) -> dict[str, FaultAction]:
        """Return the action of each kind of fault that has one, the method of its name; it gets the fault's spec."""
        named = {kind: getattr(self, f"_{kind}", None) for kind in KINDS}
        return {kind: action for kind, action in named.items() if action}

    async def _preempted(self, spec: Document) -> None:
        """Take the VMs back; the nodes stay, PREEMPTED, until they are deleted."""
        uids = await self._give_notice("preempted", spec["notice_seconds"], spec["node"])
        await self.nodes.preempt(uids)
        await self.slices.preempt(uids)

    async def _give_notice(self, kind: str, seconds: float | None, pod: str | None = None) -> list[str]:
        """Announce an event on the metadata servers and wait; return the IDs of the affected nodes.

        With `pod`, only the node or slice of that name is affected.
        """
        slices = [found for found in self.slices.active() if pod in (None, found["owner"].rpartition("/")[2])]
        told = [node["id"] for name, node in self._ready_nodes() if pod in (None, name.rpartition("/")[2])]
        notice = "preemptionNoticeDuration"  # of a preemption, only those VMs are told that asked for it
        told += [one["id"] for one in slices if kind != "preempted" or self.slices.scheduled_seconds(one, notice)]
        uids = list(dict.fromkeys([*told, *(found["id"] for found in slices)]))
        if seconds is not None:
            for uid in told:
                self.store.put("notice", uid, {"kind": kind})
            await asyncio.sleep(seconds)
            for uid in told:
                self.store.delete("notice", uid)
        return uids

    async def _slice_state(self, spec: Document) -> None:
        for found in self.slices.active():
            if spec["state"] == "REACTIVATING":
                await self.slices.restart(found, spec["seconds"])
            else:
                await self.slices.fall(found, spec["state"], spec["worker"], spec["message"])

    async def _maintenance(self, spec: Document) -> None:
        """Take the VMs down and bring them back later, rebooted and with new host keys, but otherwise unchanged."""
        uids = await self._give_notice("maintenance", spec["notice_seconds"])
        slices = [found for found in self.slices.active() if found["id"] in uids]
        at_once = [asyncio.create_task(self.slices.restart(found, spec["seconds"])) for found in slices]
        nodes = [(name, node) for name, node in self._ready_nodes() if node["id"] in uids]
        for name, node in nodes:
            at_work = {"maintenanceStatus": "ONGOING", "type": "UNSCHEDULED", "windowStartTime": timestamp(time.time())}
            self.store.put("node", name, {**node, "state": "REPAIRING", "upcomingMaintenance": at_work})
            await self.workers.halt(node["id"])
        await asyncio.sleep(spec["seconds"])
        for name, _ in nodes:
            node = self.store.get("node", name)
            if node is not None and node["state"] == "REPAIRING":
                if spec["new_host_keys"]:
                    self.workers.change_host_keys(node["id"])
                del node["upcomingMaintenance"]
                self.store.put("node", name, node)
                await self.nodes.provision(name)
        await asyncio.gather(*at_once)

    async def _unhealthy(self, spec: Document) -> None:
        """Report the nodes as unhealthy; their programs keep running."""
        for name, node in self._ready_nodes():
            sick = {**node, "health": spec["health"], "healthDescription": spec["words"]}
            if spec["symptom"]:
                worker = str(spec["worker"] or 0)
                found = {"createTime": timestamp(time.time()), "symptomType": spec["symptom"], "workerId": worker}
                sick["symptoms"] = [*node.get("symptoms", []), {**found, "details": spec["words"]}]
            self.store.put("node", name, sick)

    async def _tokens_expired(self, _: Document) -> None:
        self.store.put(EXPIRED_KIND, EXPIRED_NAME, {"time": time.time()})

    async def _controller_killed(self, _: Document) -> None:
        await asyncio.to_thread(kill_client, self.peers())

    async def _frozen(self, spec: Document) -> None:
        await self._signal(spec["worker"], signal.SIGSTOP)

    async def _killed(self, spec: Document) -> None:
        if spec["out_of_memory"]:
            for worker in self._affected_workers(spec["worker"]):
                (self.workers.home(worker).parent / "vmstat").write_text("oom_kill 1\n")
        await self._signal(spec["worker"], signal.SIGKILL)

    async def _worker_clock(self, spec: Document) -> None:
        for worker in self._affected_workers(spec["worker"]):
            (self.workers.home(worker).parent / CLOCK_FILE).write_text(f"{spec['seconds']}")

    async def _disk_full(self, spec: Document) -> None:
        """Limit running processes; later sessions check the disk when they start."""
        for worker in self._affected_workers(spec["worker"]):
            free = self.workers.home(worker).parent / DISK_FILE
            if is_full := self.workers.disk_is_full(worker):
                free.write_text("0")
            else:
                free.unlink(missing_ok=True)
            await asyncio.to_thread(set_disk_full, process_marker(self.workers.state, worker), is_full)

    async def _chip_held(self, spec: Document) -> None:
        """Start a process that opens the first chip and ends by itself; called at the beginning and at the end."""
        for worker in self._affected_workers(spec["worker"]):
            if self.faults.affects(worker.index, "chip_held"):
                marker = {MARKER: process_marker(self.workers.state, worker)}
                with first_chip(self.workers.home(worker).parent).open() as chip:
                    await asyncio.create_subprocess_exec(
                        "sleep", str(spec["seconds"]), stdin=chip, start_new_session=True, env={**os.environ, **marker}
                    )

    async def _signal(self, index: int | None, number: signal.Signals) -> None:
        for worker in self._affected_workers(index):
            await asyncio.to_thread(signal_programs, process_marker(self.workers.state, worker), number)

    def _affected_workers(self, index: int | None) -> list[EmulatedWorker]:
        return [worker for worker in self.workers.vms.running() if index is None or worker.index == index]

    def _ready_nodes(self) -> list[tuple[str, Document]]:
        return [(name, node) for name, node in self.store.items("node") if node["state"] == "READY"]

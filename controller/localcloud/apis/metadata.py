"""Metadata server of a worker (https://cloud.google.com/compute/docs/metadata/predefined-metadata-keys)."""

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from controller.localcloud.apis.service import Service
from controller.localcloud.http.call import PROJECT_NUMBER
from controller.localcloud.iam import Judge, Tokens
from controller.localcloud.store import Document
from controller.localcloud.vms.hosts import SLICE_KIND, metadata_attributes, metadata_tree
from controller.localcloud.vms.image import EmulatedWorker, vm_name

PREFIX = "computeMetadata/v1/"
_HEADERS = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
_POLL_SECONDS = 0.25


@dataclass(eq=False)
class MetadataServer(Service):
    """Serves metadata to programs on a VM; each worker has its own URL."""

    tokens: Tokens
    judge: Judge

    async def handle(self, request: web.Request, path: str, uid: str, index: int) -> web.Response:
        """Return the value at `path`; 403 without the Metadata-Flavor header, 404 for an unknown key.

        With `wait_for_change`, wait until the ETag differs from `last_etag` (by default the current one), or until
        `timeout_sec` has passed: https://cloud.google.com/compute/docs/metadata/querying-metadata#waitforchange
        """
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403, text="Missing Metadata-Flavor:Google header.", headers=_HEADERS)
        answer = self._current_value(request, path, uid, index)
        if request.query.get("wait_for_change", "").lower() == "true":
            known = request.query.get("last_etag", answer.headers.get("ETag"))
            late = time.monotonic() + float(request.query.get("timeout_sec", "inf"))
            while answer.headers.get("ETag") == known and time.monotonic() < late:
                seen = self.store.writes
                await asyncio.sleep(_POLL_SECONDS)
                if self.store.writes != seen:
                    answer = self._current_value(request, path, uid, index)
        return answer

    def _current_value(self, request: web.Request, path: str, uid: str, index: int) -> web.Response:
        workers = {worker.index: worker for worker in self.workers.vms.workers_of(uid)}
        node = next((node for _, node in self.store.items("node") if node["id"] == uid), None)
        instance = self.workers.vms.instance_of(uid, index)
        value: Any = None
        if instance and instance["id"] == uid:
            zone, attributes = instance["path"].split("/")[3], metadata_attributes(instance)
            value = metadata_tree(uid, instance["name"], zone, attributes=attributes)
        elif instance and index in workers:
            value = self._instance_tree(instance, workers[index])
        elif node is not None and index in workers:
            value = self._node_tree(node, workers[index])
        if value is None:
            return web.Response(status=404, text="no such worker", headers=_HEADERS)
        value["instance"]["service-accounts"] = self._accounts(f"{uid}/{index}")
        keys = [key for key in path.removeprefix(PREFIX).split("/") if key]
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                return web.Response(status=404, text=f"{path} was not found", headers=_HEADERS)
            value = value[key]
        headers = {**_HEADERS, "ETag": hashlib.sha256(repr(value).encode()).hexdigest()[:16]}
        if not isinstance(value, dict):
            return web.Response(text=str(value), headers=headers)
        if request.query.get("recursive", "").lower() == "true" or (keys and keys[-1] == "token"):
            return web.json_response(value, headers=headers)
        listing = "".join(f"{key}/\n" if isinstance(child, dict) else f"{key}\n" for key, child in value.items())
        return web.Response(text=listing, headers=headers)

    def _accounts(self, client: str) -> dict[str, Any]:
        """Return the service accounts of a VM, each under its address and as `default`."""
        caller = self.judge.caller(client)
        if not caller.email:
            return {}
        scopes = "\n".join(sorted(caller.scopes))
        account = {"aliases": "default", "email": caller.email, "scopes": scopes, "token": self.tokens.issue(client)}
        return {"default": account, caller.email: account}

    def _instance_tree(self, instance: Document, worker: EmulatedWorker) -> dict[str, Any]:
        """Return the metadata of an instance that is a worker of a slice."""
        slice_ = self.store.get(SLICE_KIND, worker.uid) or {}
        stopped = instance["status"] in ("STOPPING", "TERMINATED") and slice_.get("phase") == "PREEMPTED"
        scheduling = instance.get("scheduling") or {}
        return metadata_tree(
            instance["id"],
            instance["name"],
            slice_["zone"],
            **{"machine-type": f"projects/{PROJECT_NUMBER}/machineTypes/{slice_['machine']}"},
            **self._events(worker.uid, stopped),
            scheduling={
                "on-host-maintenance": scheduling.get("onHostMaintenance", "MIGRATE"),
                "preemptible": "TRUE" if scheduling.get("provisioningModel") == "SPOT" else "FALSE",
                "automatic-restart": "TRUE" if scheduling.get("automaticRestart") else "FALSE",
            },
            tags=json.dumps((instance.get("tags") or {}).get("items", [])),
            attributes=metadata_attributes(instance),
        )

    def _node_tree(self, node: Document, worker: EmulatedWorker) -> dict[str, Any]:
        """Return the metadata of a worker of a TPU node."""
        peers = ",".join(f"unknown:unknown:{peer.address}" for peer in self.workers.vms.workers_of(worker.uid))
        attributes = {
            **node.get("metadata", {}),
            "accelerator-type": node["acceleratorType"],
            "agent-worker-number": str(worker.index),
            "instance-id": node["name"].rpartition("/")[2],
            "worker-network-endpoints": peers,
        }
        return metadata_tree(
            f"{worker.uid}{worker.index:03d}",
            vm_name(worker),
            node["name"].split("/")[3],
            **self._events(node["id"], node["state"] == "PREEMPTED"),
            attributes=attributes,
        )

    def _events(self, uid: str, preempted: bool) -> dict[str, str]:
        """Return what the VMs of a node or slice are told of a preemption and of maintenance."""
        notice = (self.store.get("notice", uid) or {}).get("kind")
        return {
            "preempted": "TRUE" if preempted or notice == "preempted" else "FALSE",
            "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE" if notice == "maintenance" else "NONE",
        }

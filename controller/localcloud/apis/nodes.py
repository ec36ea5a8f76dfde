"""Cloud TPU v2: nodes (https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes)."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from controller.localcloud.apis.catalog import AcceleratorType
from controller.localcloud.apis.networks import check_attached
from controller.localcloud.apis.operations import Effect, as_longrunning
from controller.localcloud.apis.quotas import state_document
from controller.localcloud.apis.service import Service
from controller.localcloud.delays import LARGE_SLICE_VMS
from controller.localcloud.http.call import (
    DEFAULT_ACCOUNT,
    PROJECT,
    PROJECT_NUMBER,
    ApiCall,
    as_proto,
    check_project,
    paginate,
    timestamp,
    with_number,
)
from controller.localcloud.http.errors import ApiError, failed_precondition
from controller.localcloud.iam import is_visible
from controller.localcloud.store import Document

_PATCHABLE = ("description", "labels", "metadata", "tags")
_TPU_PORT = 8470


@dataclass(eq=False)
class Nodes(Service):
    """Nodes, also used by queued resources. They are stored by full name, kind "node"."""

    methods: ClassVar = {
        "tpu.v2:projects.locations.nodes.": "create get list delete patch stop start getGuestAttributes"
    }

    def effects(self) -> dict[str, Effect]:
        return {
            "node.ready": self._on_ready,
            "node.stopped": self._on_stopped,
            "node.gone": self.remove,
        }

    @property
    def zones(self) -> list[str]:
        more = {spec["zone"] for spec in self.faults.standing("offered") if spec["type"]}
        return sorted({*self.catalog.zones, *more})

    def location(self, call: ApiCall) -> str:
        """Return the parent of a call, `projects/P/locations/ZONE`; raise ApiError 403 for an unknown one."""
        check_project(call.path["projectsId"])
        zone = call.path["locationsId"]
        if zone != "-" and zone not in self.zones:
            raise ApiError(403, f"Permission denied on 'locations/{zone}' (or it may not exist).")
        return f"projects/{PROJECT}/locations/{zone}"

    def add(self, location: str, node_id: str, body: Mapping[str, Any], queued: str | None = None) -> Document:
        """Validate and store a node in state CREATING; raise ApiError 400, 404 or 409."""
        name, zone = f"{location}/nodes/{node_id}", location.rpartition("/")[2]
        if self.store.get("node", name):
            raise ApiError(409, f"Resource '{name}' already exists")
        if body.get("networkConfig") and body.get("networkConfigs"):  # words: the API's description of both
            raise ApiError(400, "network_config and network_configs are mutually exclusive")
        kind = self.accelerator(location, body)
        disks: list[Document] = body.get("dataDisks") or []
        check_attached(self.store, zone, disks, kind.generation, kind.vms)
        uid = str(self.store.next_number("node", 4_000_000_000))
        config = body.get("networkConfig") or {}
        region, external = zone.rpartition("-")[0], {"enableExternalIps": bool(config.get("enableExternalIps"))}
        network, subnetwork = self.networks.attach(region, config.get("network"), config.get("subnetwork"))
        node: Document = {
            **{key: value for key, value in body.items() if value is not None},
            "name": name,
            "id": uid,
            "acceleratorType": kind.name,
            "state": "CREATING",
            "apiVersion": "V2",
            "createTime": timestamp(time.time()),
            "networkConfig": {**external, **config, "network": network, "subnetwork": subnetwork},
            "multisliceNode": False,
            "serviceAccount": {**(body.get("serviceAccount") or {}), "email": account_of(body)},
            **({"acceleratorConfig": kind.config} if kind.config else {}),
            **({"queuedResource": queued} if queued else {}),
        }
        account = account_of(body)
        if account != DEFAULT_ACCOUNT and not is_visible(self.store.get("serviceAccount", account)):
            raise ApiError(400, f"Cloud TPU received a bad request. Service account {account} does not exist.")
        self.store.put("node", name, node)
        return node

    def check_agent(self) -> None:
        """Raise ApiError 403 while the account with which Google makes VMs in the project is not seen everywhere."""
        if time.time() < (self.store.get("service", "tpu.googleapis.com") or {}).get("agentAt", 0.0):
            agent = f"service-{PROJECT_NUMBER}@cloud-tpu.iam.gserviceaccount.com"
            denied = "Cloud TPU got permission denied when trying to access the customer project."
            raise ApiError(403, f"{denied} Make sure that the IAM account '{agent}' has the 'TPU Service Agent' role.")

    def accelerator(self, location: str, body: Mapping[str, Any]) -> AcceleratorType:
        """Return the accelerator type of a node; raise ApiError 400 if it or the runtime version is unknown."""
        zone = location.rpartition("/")[2]
        name, config = body.get("acceleratorType"), body.get("acceleratorConfig") or {}
        kind = self.catalog.types.get(name) if name else self.catalog.find_by_config(config)
        if kind is None or kind not in self.catalog.types_in_zone(zone):
            wanted = name or body.get("acceleratorConfig")
            choices = ", ".join(one.name for one in self.catalog.types_in_zone(zone)[:8])
            message = f'Accelerator type "{wanted}" was not found in {zone}: {choices}'
            raise ApiError(400, f"Cloud TPU received a bad request. {message}")
        runtime = body.get("runtimeVersion")
        if runtime not in self.catalog.runtime_versions:
            choices = ", ".join(sorted(self.catalog.runtime_versions))
            raise ApiError(400, f'Cloud TPU received a bad request. Runtime version "{runtime}" unknown: {choices}')
        return kind

    async def provision(self, name: str) -> None:
        """Boot the VMs of a CREATING node; raise ApiError 429 if there is no capacity, leaving the node as it is."""
        node = self._find(name)
        zone = name.split("/")[3]
        if node["state"] == "READY":
            return  # done before the emulator was killed
        self.faults.refuse_creation("operation", zone, self.capacity_tier(node), node["acceleratorType"])
        if exhausted := self.quotas.exhausted_by(zone, node["id"]):
            raise exhausted
        kind = self.catalog.types[node["acceleratorType"]]
        wrong, without_chip = self.faults.take("endpoints"), self.faults.worker_without_chip()
        count = wrong["endpoints"] if wrong else kind.vms
        addresses = [worker.address for worker in await self.workers.boot(node["id"], count, kind, without_chip)]
        endpoints: list[Document] = [{"ipAddress": address, "port": _TPU_PORT} for address in addresses]
        if node["networkConfig"].get("enableExternalIps"):
            endpoints = [{**one, "accessConfig": {"externalIp": one["ipAddress"]}} for one in endpoints]
        now = time.time()
        with self.store.transaction():
            node |= {"state": "READY", "health": "HEALTHY", "networkEndpoints": endpoints}
            self.store.put("node", name, node)
            self.store.put("boot", name, {"time": now})
            self.faults.on_node_ready(now)
        await self.workers.settle()
        await self.workers.run_startup_scripts(node["id"])

    def capacity_tier(self, node: Mapping[str, Any]) -> str:
        """Return the capacity tier that was requested for a node."""
        queued = self.store.get("queued", node.get("queuedResource", "")) or {}
        if queued.get("provisioningModel") == "FLEX_START":
            return "flex_start"
        scheduling = node.get("schedulingConfig") or {}
        return next((word for word in ("spot", "preemptible", "reserved") if scheduling.get(word)), "on_demand")

    async def remove(self, name: str) -> None:
        node = self.store.get("node", name)
        if node is not None:
            self.store.put("node", name, {**node, "state": "DELETING"})
            try:
                await self.workers.remove(node["id"])
            except Exception:
                self.store.put("node", name, node)
                raise
            self.store.delete("node", name)
            self.store.delete("boot", name)
            self.store.delete("notice", node["id"])
            until = time.time() + self.settings.delay("end of use", name)
            self.networks.keep_in_use(name, node["networkConfig"], until)

    async def preempt(self, uids: Collection[str]) -> None:
        """Preempt those of the nodes that are READY: their VMs go away; the nodes stay, PREEMPTED."""
        nodes = self.store.items("node")
        taken = [(name, node) for name, node in nodes if node["state"] == "READY" and node["id"] in uids]
        with self.store.transaction():
            for name, node in taken:
                self.store.put("node", name, {**node, "state": "PREEMPTED"})
                self.store.delete("boot", name)
                if queued := self.store.get("queued", node.get("queuedResource", "")):
                    self.store.put("queued", queued["name"], {**queued, "state": state_document("SUSPENDING")})
                    self._begin_suspension(queued["name"])
        for _, node in taken:
            await self.workers.halt(node["id"])

    def _find(self, name: str) -> Document:
        return self.store.require("node", name, f"Resource '{name}' was not found")

    def _named(self, call: ApiCall) -> Document:
        return self._find(f"{self.location(call)}/nodes/{call.path['nodesId']}")

    def _create(self, call: ApiCall) -> Document:
        location = self.location(call)
        zone, tier = location.rpartition("/")[2], self.capacity_tier(call.body)
        self.faults.refuse_creation("request", zone, tier, call.body.get("acceleratorType", ""))
        call.require_account(account_of(call.body))
        self.check_agent()
        self.quotas.check_tpus(zone, [self.accelerator(location, call.body)], tier)
        node = self.add(location, call.required("nodeId"), call.body)
        kind = self.kind_of_creation(location, node)
        return as_longrunning(self.operations.begin("create", node["name"], "node.ready", delay=kind))

    def kind_of_creation(self, location: str, body: Mapping[str, Any]) -> str:
        return "create large nodes" if self.accelerator(location, body).vms >= LARGE_SLICE_VMS else "create nodes"

    def _begin(self, verb: str, node: Document, state: str, effect: str | None = None) -> Document:
        """Begin a change of a node, which is in `state` meanwhile."""
        name = node["name"]
        self.store.put("node", name, {**node, "state": state})
        return as_longrunning(self.operations.begin(verb, name, effect, ("node", node) if effect else None))

    def _get(self, call: ApiCall) -> Document:
        return self._shown(self._named(call))

    def _list(self, call: ApiCall) -> Document:
        return self.listed(call, "node", "nodes", self._shown)

    def _shown(self, node: Document) -> Document:
        """Return a node as the API shows it, with the names of what it has as a fault wants them."""
        shown, location = render_node(node), node["name"].partition("/nodes/")[0]
        for spec in self.faults.standing("echo"):
            match spec["form"]:
                case "absent":
                    shown = {key: shown[key] for key in shown if key not in ("runtimeVersion", "networkConfig")}
                case "full":
                    shown |= {key: f"{location}/{key}s/{shown[key]}" for key in ("acceleratorType", "runtimeVersion")}
                case _:
                    shown["runtimeVersion"] = "other"
        return shown

    def listed(self, call: ApiCall, kind: str, plural: str, render: Callable[[Document], Document]) -> Document:
        """Return a page of the resources of a location, or of all with the location `-`."""
        location = self.location(call)
        found = self.store.items(kind, location[:-1] if location.endswith("/-") else f"{location}/{plural}/")
        shown = [render(item) for name, item in found if not self.faults.hides(name.split("/")[3], item["createTime"])]
        asked = location.rpartition("/")[2]
        told = [spec["place"] for spec in self.faults.standing("unreachable") if asked in ("-", spec["place"])]
        where = [f"projects/{PROJECT}/locations/{place}" for place in told if place in self.catalog.zones]
        return paginate(call, shown) | ({"unreachable": where} if where else {})

    def _delete(self, call: ApiCall) -> Document:
        node = self._named(call)
        if node["state"] == "DELETING":
            raise _busy_error(node["name"])
        self.operations.cancel_for(node["name"])
        begun = self._begin("delete", node, "DELETING", "node.gone")
        self.suspend_request(node.get("queuedResource", ""))
        self.workers.schedule_settle()
        return begun

    def suspend_request(self, queued_name: str) -> None:
        """Suspend an ACTIVE request whose nodes the user has all deleted: the API describes SUSPENDING so."""
        queued = self.store.get("queued", queued_name)
        of_request = [node for _, node in self.store.items("node") if node.get("queuedResource") == queued_name]
        if queued and queued["state"]["state"] == "ACTIVE" and all(node["state"] == "DELETING" for node in of_request):
            self.store.put("queued", queued_name, {**queued, "state": state_document("SUSPENDING", "USER")})
            self._begin_suspension(queued_name)

    def _begin_suspension(self, queued: str) -> None:
        self.operations.begin("suspend", queued, "queued.provision", delay="suspension")

    def _patch(self, call: ApiCall) -> Document:
        node = self._named(call)
        if node["state"] not in ("READY", "STOPPED"):
            raise _busy_error(node["name"])
        mask = call.mask
        if not mask or not set(mask) <= set(_PATCHABLE):
            raise ApiError(400, f"updateMask must name some of: {', '.join(_PATCHABLE)}; it is '{','.join(mask)}'")
        kept = {field: value for field, value in node.items() if field not in mask}
        return self._begin("update", {**kept, **call.masked_body()}, node["state"])

    def _stop(self, call: ApiCall) -> Document:
        return self._change_state(call, "stop", "READY", "STOPPING", "node.stopped")

    def _start(self, call: ApiCall) -> Document:
        return self._change_state(call, "start", "STOPPED", "STARTING", "node.ready")

    def _change_state(self, call: ApiCall, verb: str, state: str, during: str, effect: str) -> Document:
        """Stop or start a node that is in `state`; it is in state `during` until then."""
        node = self._named(call)
        name = node["name"]
        if len(node.get("networkEndpoints", ())) > 1:
            # https://cloud.google.com/tpu/docs/managing-tpus-tpu-vm: only single-host TPUs can be stopped.
            raise failed_precondition(f"Cannot {verb} {name}: it is a TPU slice of several VMs")
        if (tier := self.capacity_tier(node)) in ("spot", "preemptible"):
            raise failed_precondition(f"Cannot {verb} {name}: it is {tier}; such a node can only be deleted")
        if node["state"] != state:
            raise failed_precondition(f"Cannot {verb} {name} in state {node['state']}: it must be {state}")
        return self._begin(verb, node, during, effect)

    async def _on_ready(self, name: str) -> None:
        """Boot a node; if that fails it is gone, or STOPPED again."""
        try:
            await self.provision(name)
        except Exception:
            node = self.store.get("node", name) or {}
            if node.get("state") == "STARTING":
                self.store.put("node", name, {**node, "state": "STOPPED"})
            else:
                await self.remove(name)
            raise

    async def _on_stopped(self, name: str) -> None:
        node = self._find(name)
        await self.workers.halt(node["id"])
        self.store.put("node", name, {**node, "state": "STOPPED"})
        self.store.delete("boot", name)

    def _get_guest_attributes(self, call: ApiCall) -> Document:
        node = self._named(call)
        if node["state"] != "READY":
            raise failed_precondition(f"{node['name']} is {node['state']}: it has no guest attributes")
        wanted = {index for index in call.body.get("workerIds", ()) if index}
        workers = self.workers.vms.workers_of(node["id"])
        chosen = [worker for worker in workers if not wanted or str(worker.index) in wanted]
        published = [self.workers.guest_attributes(worker) for worker in chosen]
        if not any(published):  # as Compute answers before a VM has published any
            where = f"{node['name']}/guestAttributes/"
            raise ApiError(404, f"The resource '{where}' of type 'Guest Attribute' was not found.")
        return {
            "guestAttributes": [
                {"queryPath": "", "queryValue": {"items": items} if items else {}} for items in published
            ]
        }


def account_of(body: Mapping[str, Any]) -> str:
    """Return the address of the service account that a node is to have."""
    return (body.get("serviceAccount") or {}).get("email") or DEFAULT_ACCOUNT


def render_node(node: Document) -> Document:
    """Return a node as the API shows it, with project numbers in the names of other resources."""
    shown = dict(node)
    if config := node.get("networkConfig"):
        names = {key: with_number(config[key]) for key in ("network", "subnetwork") if key in config}
        shown["networkConfig"] = {**config, **names}
    if "queuedResource" in node:
        shown["queuedResource"] = with_number(node["queuedResource"])
    return as_proto(shown)


def _busy_error(name: str) -> ApiError:
    return ApiError(409, f"Unable to queue the operation: another one is under way on {name}", status="ABORTED")

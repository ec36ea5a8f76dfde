"""Cloud TPU v2: queued resources, operations, locations, accelerator types and runtime versions."""

import time
from dataclasses import dataclass
from typing import ClassVar

from controller.localcloud.apis.nodes import Nodes, account_of, render_node
from controller.localcloud.apis.operations import Effect, as_longrunning
from controller.localcloud.apis.quotas import capacity_tier, multi_slice_spec, requested_nodes, state_document
from controller.localcloud.apis.service import Service
from controller.localcloud.http.call import (
    PROJECT,
    PROJECT_NUMBER,
    ApiCall,
    as_proto,
    check_project,
    paginate,
    timestamp,
    with_number,
)
from controller.localcloud.http.errors import ApiError, failed_precondition, internal_error
from controller.localcloud.store import Document


@dataclass(eq=False)
class QueuedResources(Service):
    """Queued resources (kind "queued"): requests for nodes that wait for capacity."""

    nodes: Nodes
    # v2alpha1: methods that clients use: https://cloud.google.com/tpu/docs/reference/rest/v2alpha1
    methods: ClassVar = {
        f"tpu.{version}:projects.locations.queuedResources.": "create get list delete" for version in ("v2", "v2alpha1")
    }

    def effects(self) -> dict[str, Effect]:
        return {"queued.provision": self._provision, "queued.gone": self._on_deleted}

    def _create(self, call: ApiCall) -> Document:
        location = self.nodes.location(call)
        name = f"{location}/queuedResources/{call.required('queuedResourceId')}"
        if self.store.get("queued", name):
            raise ApiError(409, f"Resource '{name}' already exists")
        specs = call.body.get("tpu", {}).get("nodeSpec", [])
        if not specs:
            raise ApiError(400, "tpu.nodeSpec must hold at least one node")
        for spec in specs:
            node = spec.get("node", {})
            call.require_account(account_of(node))
            self.nodes.accelerator(location, node)
            if bool(spec.get("nodeId")) == bool(multi_slice_spec(spec)):
                raise ApiError(400, "Exactly one of nodeId and multisliceParams must be set in a nodeSpec")
        if sum(key in call.body for key in ("spot", "guaranteed", "bestEffort")) > 1:
            raise ApiError(400, "Invalid value: oneof field 'tier' is already set.")
        if call.body.get("provisioningModel") == "FLEX_START" and "runDuration" not in call.body:
            raise ApiError(400, "run_duration must be set with the FLEX_START provisioning model")
        wanted = [body for _, body in requested_nodes({**call.body, "name": name})]
        zone, tier = location.rpartition("/")[2], capacity_tier(call.body)
        self.faults.refuse_creation("request", zone, tier, wanted[0].get("acceleratorType", ""))
        self.nodes.check_agent()
        self.quotas.check_tpus(zone, [self.nodes.accelerator(location, node) for node in wanted], tier)
        # ACCEPTED is a former name of this state: https://cloud.google.com/tpu/docs/queued-resources
        state = state_document("WAITING_FOR_RESOURCES")
        queued = {**call.body, "name": name, "createTime": timestamp(time.time()), "state": state}
        self.store.put("queued", name, queued)
        self.operations.begin("provision", name, "queued.provision", delay="queue")
        return as_longrunning(self.operations.begin("create", name))

    async def _provision(self, name: str) -> float | None:
        """Take a request one state further; return the seconds until its next state, or None after the last."""
        queued = self.store.get("queued", name)
        state = queued["state"]["state"] if queued else "DELETING"
        if queued is None or state in ("DELETING", "ACTIVE", "SUSPENDED", "FAILED"):
            return None
        if state == "SUSPENDING":
            nodes = [self.store.get("node", node) for node in self._live_nodes(name)]
            if any(node and node["state"] == "DELETING" for node in nodes):
                return self._look_again()
            return self._end_suspension(queued)
        if state == "PROVISIONING":
            if time.time() < (self.store.get("queuedHold", name) or {}).get("until", 0.0):
                return self._look_again()
            return await self._create_nodes(queued)
        if _is_expired(queued):
            expired = ApiError(504, "The queued resource has expired", status="DEADLINE_EXCEEDED")
            return self._fail(queued, expired.rpc_status())
        if not self._has_capacity(queued):
            return self._look_again()
        if end := self.faults.take("queued"):
            if end["state"] != "PROVISIONING":
                return self._suspend(queued, ApiError(500, end["message"]) if end["state"] == "FAILED" else None)
            self.store.put("queuedHold", name, {"until": time.time() + end["seconds"]})
        self._set_state(queued, "PROVISIONING")
        location, wanted = name.partition("/queuedResources/")[0], requested_nodes(queued)
        kinds = {f"{location}/nodes/{node_id}": self.nodes.kind_of_creation(location, body) for node_id, body in wanted}
        return max(self.settings.delay(kind, node) for node, kind in kinds.items())

    def _has_capacity(self, queued: Document) -> bool:
        """Return whether a request may leave the queue: it waits there until the capacity is free.

        https://cloud.google.com/python/docs/reference/tpu/latest/google.cloud.tpu_v2.types.QueuedResourceState.State
        """
        zone, tier = queued["name"].split("/")[3], capacity_tier(queued)
        kind = next(body for _, body in requested_nodes(queued)).get("acceleratorType", "")
        try:
            self.faults.refuse_creation("operation", zone, tier, kind, kinds=("stockout",))
        except ApiError:
            return False
        return True

    async def _create_nodes(self, queued: Document) -> float | None:
        """Create all nodes of a request; return a retry delay if there is no capacity."""
        name = queued["name"]
        location = name.partition("/queuedResources/")[0]
        names = []
        try:
            for node_id, body in requested_nodes(queued):
                node = self.store.get("node", f"{location}/nodes/{node_id}")
                names.append((node or self.nodes.add(location, node_id, body, queued=name))["name"])
            for node_name in names:
                await self.nodes.provision(node_name)
        except Exception as refusal:
            for node_name in names:
                await self.nodes.remove(node_name)
            if not isinstance(refusal, ApiError):
                self._fail(queued, internal_error(refusal).rpc_status())
                raise
            if refusal.status != "RESOURCE_EXHAUSTED" or "no more capacity" not in refusal.message:
                return self._suspend(queued, refusal)
            self._set_state(queued, "WAITING_FOR_RESOURCES")
            return self._look_again()
        self._set_state(queued, "ACTIVE")
        return None

    def _suspend(self, queued: Document, why: ApiError | None) -> float:
        """Start to take back a request that ends SUSPENDED, or FAILED if there is an error."""
        self.store.put("queuedRefusal", queued["name"], why.rpc_status() if why else {})
        self._set_state(queued, "SUSPENDING")
        return self.settings.delay("suspension", queued["name"])

    def _look_again(self) -> float:
        return max(self.settings.delay("another look for capacity"), 0.05)

    def _end_suspension(self, queued: Document) -> None:
        why = self.store.get("queuedRefusal", queued["name"])
        self.store.delete("queuedRefusal", queued["name"])
        initiator = queued["state"].get("stateInitiator", "SERVICE")
        if why:
            self._fail(queued, why, initiator)
        else:
            self._set_state(queued, "SUSPENDED", initiator)

    def _set_state(self, queued: Document, state: str, initiator: str = "SERVICE", **data: Document) -> None:
        self.store.put("queued", queued["name"], {**queued, "state": state_document(state, initiator) | data})

    def _fail(self, queued: Document, why: Document, initiator: str = "SERVICE") -> None:
        """Mark a request as FAILED, for this reason, a google.rpc.Status."""
        told = {"error": {key: why[key] for key in ("code", "message")}}
        self._set_state(queued, "FAILED", initiator, failedData=told)

    def _find(self, call: ApiCall) -> Document:
        name = f"{self.nodes.location(call)}/queuedResources/{call.path['queuedResourcesId']}"
        return self.store.require("queued", name, f"Resource '{name}' was not found")

    def _get(self, call: ApiCall) -> Document:
        return _render_queued(self._find(call))

    def _list(self, call: ApiCall) -> Document:
        return self.nodes.listed(call, "queued", "queuedResources", _render_queued)

    def _delete(self, call: ApiCall) -> Document:
        queued = self._find(call)
        name = queued["name"]
        live, state = self._live_nodes(name), queued["state"]["state"]
        if state == "PROVISIONING":  # not even with force; it may last for hours
            raise failed_precondition("DeleteQueuedResource is not supported when state is PROVISIONING")
        if live and not call.flag("force"):
            raise failed_precondition(f"{name} is {state} and has nodes ({live[0]}); delete them first, or use force")
        if state == "DELETING":  # another request does not begin the deletion anew
            return as_longrunning(self.operations.begin("delete", name))
        self.operations.cancel_for(name)
        self.store.put("queued", name, {**queued, "state": state_document("DELETING")})
        return as_longrunning(self.operations.begin("delete", name, "queued.gone", ("queued", queued)))

    def _live_nodes(self, queued: str) -> list[str]:
        return [name for name, node in self.store.items("node") if node.get("queuedResource") == queued]

    async def _on_deleted(self, name: str) -> None:
        for node in self._live_nodes(name):
            await self.nodes.remove(node)
        for kind in ("queued", "queuedHold", "queuedRefusal"):
            self.store.delete(kind, name)


@dataclass(eq=False)
class Locations(Service):
    """Operations, locations, and what they offer."""

    nodes: Nodes
    methods: ClassVar = {
        "tpu.v2:projects.locations.": "operations.get operations.list generateServiceIdentity get list "
        "acceleratorTypes.list acceleratorTypes.get runtimeVersions.list runtimeVersions.get",
        "tpu.v2alpha1:projects.locations.": "operations.get operations.list",
    }

    def _operations_get(self, call: ApiCall) -> Document:
        return self._render(self.operations.get(f"{self.nodes.location(call)}/operations/{call.path['operationsId']}"))

    def _operations_list(self, call: ApiCall) -> Document:
        found = self.operations.list_under(self.nodes.location(call))
        return paginate(call, [self._render(operation) for operation in found])

    def _render(self, operation: Document) -> Document:
        kind, render = ("node", render_node) if "/nodes/" in operation["target"] else ("queued", _render_queued)
        found = self.store.get(kind, operation["target"])
        return as_longrunning(operation, response=render(found) if found else None)

    def _generate_service_identity(self, call: ApiCall) -> Document:
        self.nodes.location(call)
        return {"identity": {"email": f"service-{PROJECT_NUMBER}@cloud-tpu.iam.gserviceaccount.com"}}

    def _get(self, call: ApiCall) -> Document:
        return _shown_location(self.nodes.location(call))

    def _list(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        parent = f"projects/{PROJECT}/locations"
        return paginate(call, [_shown_location(f"{parent}/{zone}") for zone in self.nodes.zones])

    def _accelerator_types(self, call: ApiCall) -> list[Document]:
        location = self.nodes.location(call)
        zone = location.rpartition("/")[2]
        offered = {kind.name: kind.config for kind in self.catalog.types_in_zone(zone)}
        more = [spec["type"] for spec in self.faults.standing("offered") if spec["zone"] == zone and spec["type"]]
        configs = {name: [config] if config else [] for name, config in {**dict.fromkeys(more), **offered}.items()}
        start = f"{location}/acceleratorTypes"
        return [{"name": f"{start}/{name}", "type": name, "acceleratorConfigs": configs[name]} for name in configs]

    def _runtime_versions(self, call: ApiCall) -> list[Document]:
        location = self.nodes.location(call)
        # Google's list lacks the documented image of v5e, which can be used.
        versions = sorted(self.catalog.runtime_versions - {"v2-alpha-tpuv5-lite"})
        return [{"name": f"{location}/runtimeVersions/{version}", "version": version} for version in versions]

    def _accelerator_types_list(self, call: ApiCall) -> Document:
        return paginate(call, self._accelerator_types(call))

    def _accelerator_types_get(self, call: ApiCall) -> Document:
        return _find_named(self._accelerator_types(call), call.path["acceleratorTypesId"])

    def _runtime_versions_list(self, call: ApiCall) -> Document:
        return paginate(call, self._runtime_versions(call))

    def _runtime_versions_get(self, call: ApiCall) -> Document:
        return _find_named(self._runtime_versions(call), call.path["runtimeVersionsId"])


def _render_queued(queued: Document) -> Document:
    """Return a request as the API shows it: https://cloud.google.com/tpu/docs/queued-resources has an example."""
    specs = []
    for spec in queued["tpu"]["nodeSpec"]:
        node = {**render_node(spec.get("node", {})), "queuedResource": with_number(queued["name"])}
        specs.append({**spec, "parent": with_number(spec.get("parent", "")), "node": node})
    return as_proto({**queued, "tpu": {**queued["tpu"], "nodeSpec": specs}})


def _shown_location(name: str) -> Document:
    return {"name": name, "locationId": name.rpartition("/")[2]}


def _find_named(items: list[Document], wanted: str) -> Document:
    found = [item for item in items if item["name"].rpartition("/")[2] == wanted]
    if not found:
        raise ApiError(404, f"Resource '{wanted}' was not found")
    return found[0]


def _is_expired(queued: Document) -> bool:
    policy = queued.get("queueingPolicy", {})
    # validUntilDuration counts from the creation of the request.
    if duration := policy.get("validUntilDuration"):
        return timestamp(time.time() - float(duration[:-1])) > queued["createTime"]
    until = policy.get("validUntilTime")
    return until is not None and timestamp(time.time()) > until

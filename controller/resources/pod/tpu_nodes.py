"""TPU nodes, created at once, and queued resources: requests for a node that wait for capacity.

https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes and
https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources. A request outlives its node and
keeps its name until it is deleted, even after it has expired, failed or lost its node.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.answers import (
    LABEL,
    TAG,
    OperationFailedError,
    code_name,
    leaf,
    parse_timestamp,
    poll_rpc,
    wait_rpc,
)
from controller.gcp.google_errors import GoogleError
from controller.resources.deletions import delete_slice
from controller.resources.pod.provisioner import (
    WAITING_STATES,
    Endpoint,
    IsAnswered,
    Place,
    ProvisionerName,
    SliceSpec,
    SliceStatus,
    Symptom,
    data_disk_name,
    node_metadata,
)

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
TIER_LABEL = "slipway-capacity"
TRANSITIONAL_STATES = frozenset({"CREATING", "RESTARTING", "REIMAGING", "DELETING", "REPAIRING", "STOPPING", "STARTING",
                      "HIDING", "UNHIDING", "UNKNOWN"})  # fmt: skip
API = "tpu"


@dataclass(frozen=True)
class NodeProvisioner:
    """Creates slices with `nodes.create`, which may take up to `create_seconds`."""

    create_seconds: float

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        found = context.google.find(API, "projects.locations.nodes.get", name=node_path(context, name, zone))
        return None if found is None else parse_node(found)

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> IsAnswered:
        operation = context.google.call(
            API,
            "projects.locations.nodes.create",
            parent=zone_path(context, place.zone),
            nodeId=name,
            body={**node_body(context, name, spec, place), "schedulingConfig": scheduling(place.capacity)},
        )
        method = "projects.locations.operations.get"
        response = poll_rpc(context, API, operation, method, self.create_seconds)
        return lambda: response() is not None

    def delete(
        self, context: Context, name: str, zone: str, *, is_recorded: bool = False, is_hurried: bool = False
    ) -> None:
        look, delete = partial(self.observe, context, name, zone), partial(delete_node, context, name, zone)
        delete_slice(context, name, zone, "node", look, delete, is_recorded, is_hurried)


def wait_done(context: Context, operation: dict[str, Any], seconds: float | None = None) -> None:
    """Wait for an operation of the TPU API. Raises OperationFailedError."""
    wait_rpc(context, API, operation, "projects.locations.operations.get", seconds)


def wait_deleted(context: Context, operation: dict[str, Any]) -> bool:
    """Wait for a deletion; return False if its operation cannot be read, so that the caller must look by itself.

    Raises OperationFailedError if Google did not delete it.
    """
    try:
        wait_done(context, operation)
    except OperationFailedError:
        raise
    except GoogleError as error:
        context.events.note(operation["name"], f"cannot see how the deletion goes: {error}")
        return False
    return True


def delete_node(context: Context, name: str, zone: str) -> bool:
    """Delete a node, and wait as `wait_deleted` does."""
    operation = context.google.call(API, "projects.locations.nodes.delete", name=node_path(context, name, zone))
    return wait_deleted(context, operation)


def zone_path(context: Context, zone: str) -> str:
    return f"projects/{context.project}/locations/{zone}"


def node_path(context: Context, name: str, zone: str) -> str:
    return f"{zone_path(context, zone)}/nodes/{name}"


def node_body(context: Context, name: str, spec: SliceSpec, place: Place) -> dict[str, Any]:
    """Return the body of a create request, without the tier: what `gcloud compute tpus tpu-vm create` sends."""
    node: dict[str, Any] = {
        "acceleratorType": spec.accelerator_type,
        "runtimeVersion": spec.runtime_version,
        "labels": {**LABEL, TIER_LABEL: place.capacity},
        "metadata": node_metadata(context, spec, deletions(context, name, place.zone)),
        "networkConfig": {
            "enableExternalIps": spec.external_ip,
            "network": f"projects/{context.project}/global/networks/{spec.network}",
            "subnetwork": f"projects/{context.project}/regions/{place.region}/subnetworks/{place.subnetwork}",
        },
        "serviceAccount": {"email": context.account_email(spec.service_account), "scope": [SCOPE]},
        "shieldedInstanceConfig": {"enableSecureBoot": False},
        "tags": [TAG],
    }
    if spec.data_disk_gb is not None:
        disk = f"projects/{context.project}/zones/{place.zone}/disks/{data_disk_name(name)}"
        node["dataDisks"] = [{"sourceDisk": disk, "mode": "READ_WRITE"}]
    return node


def deletions(context: Context, name: str, zone: str) -> list[str]:
    """Return what to delete, as URLs; the queued request is first: it holds the node and outlives it."""
    where = f"{context.google.root(API)}v2/{zone_path(context, zone)}"
    return [f"{where}/queuedResources/{name}?force=true", f"{where}/nodes/{name}"]


def scheduling(capacity: str) -> dict[str, bool]:
    """Return the node's scheduling options for a tier."""
    if capacity == "flex_start":
        raise CloudError("tpu.provisioner: flex_start requires a queued resource; set it to auto or queued")
    return {"preemptible": capacity == "preemptible", "reserved": capacity == "reserved", "spot": capacity == "spot"}


def capacity_of(answer: dict[str, Any]) -> str:
    """Return the tier of a node, by preference from our label, since the API does not report all tiers."""
    said = answer.get("schedulingConfig", {})
    found = next((word for word in ("spot", "preemptible", "reserved") if said.get(word)), "on_demand")
    return answer.get("labels", {}).get(TIER_LABEL, found)


def parse_node(answer: dict[str, Any], provisioner: ProvisionerName = "node") -> SliceStatus:
    zone = answer["name"].split("/")[3]
    network = answer.get("networkConfig") or (answer.get("networkConfigs") or [{}])[0]
    state = answer.get("state", "UNKNOWN")
    maintenance = answer.get("upcomingMaintenance", {}).get("maintenanceStatus", "")
    endpoints = tuple(
        Endpoint(i, e.get("ipAddress", ""), e.get("accessConfig", {}).get("externalIp"))
        for i, e in enumerate(answer.get("networkEndpoints", []))
    )
    return SliceStatus(
        name=leaf(answer["name"]),
        spec=SliceSpec(
            workers=len(endpoints),
            accelerator_type=leaf(answer.get("acceleratorType", "")),
            runtime_version=leaf(answer.get("runtimeVersion", "")),
            network=leaf(network.get("network", "")),
            external_ip=network.get("enableExternalIps", any(endpoint.external for endpoint in endpoints)),
            service_account=answer.get("serviceAccount", {}).get("email", ""),
        ),
        place=Place(zone, capacity_of(answer), leaf(network.get("subnetwork", "")), provisioner),
        state=state,
        pending=state in TRANSITIONAL_STATES,
        uid=answer.get("id", "") + answer.get("createTime", ""),
        created=parse_timestamp(answer.get("createTime")),
        running_since=parse_timestamp(answer.get("createTime")),
        endpoints=endpoints,
        ssh_keys=answer.get("metadata", {}).get("ssh-keys", ""),
        labels=tuple(sorted(answer.get("labels", {}).items())),
        tags=tuple(answer.get("tags", ())),
        health=answer.get("health", ""),
        health_description=answer.get("healthDescription", ""),
        symptoms=tuple(
            (
                parse_timestamp(s.get("createTime")),
                Symptom(s.get("symptomType", ""), s.get("workerId", ""), s.get("details", "")),
            )
            for s in answer.get("symptoms", [])
        ),
        maintenance=maintenance if maintenance in ("PENDING", "ONGOING") else "",
    )


FLEX_API = "tpu:v2alpha1"
"""The only API with flex-start, as of revision 20261001 of the discovery documents."""
FLEX_SECONDS = 7 * 24 * 3600
"""Longest lifetime of a flex-start slice: https://cloud.google.com/tpu/docs/about-flex-start"""
TRANSITIONAL_REQUEST_STATES = WAITING_STATES | {"PROVISIONING", "DELETING", "SUSPENDING", "STATE_UNSPECIFIED"}


@dataclass(frozen=True)
class QueuedProvisioner:
    """Creates slices with `queuedResources.create`; the request and its node both have the pod's name."""

    create_seconds: float

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        path = request_path(context, name, zone)
        if (queued := context.google.find("tpu", "projects.locations.queuedResources.get", name=path)) is None:
            return None
        answer = context.google.find("tpu", "projects.locations.nodes.get", name=node_path(context, name, zone))
        return parse_request(queued, answer, context.clock.now())

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> IsAnswered:
        api = FLEX_API if place.capacity == "flex_start" else "tpu"
        operation = context.google.call(
            api,
            "projects.locations.queuedResources.create",
            parent=zone_path(context, place.zone),
            queuedResourceId=name,
            body=request_body(context, name, spec, place),
        )
        response = poll_rpc(context, API, operation, "projects.locations.operations.get", self.create_seconds)
        return lambda: response() is not None

    def delete(
        self, context: Context, name: str, zone: str, *, is_recorded: bool = False, is_hurried: bool = False
    ) -> None:
        """Delete the request, then a node that has outlived it."""
        look, delete = partial(self.observe, context, name, zone), partial(self._delete, context, name, zone)
        delete_slice(context, name, zone, "queued", look, delete, is_recorded, is_hurried)
        NodeProvisioner(self.create_seconds).delete(context, name, zone, is_recorded=is_recorded)

    def _delete(self, context: Context, name: str, zone: str) -> bool:
        """Delete the request and its node, which may appear at any moment; return whether that is known to be done."""
        operation = context.google.call(
            "tpu", "projects.locations.queuedResources.delete", name=request_path(context, name, zone), force=True
        )
        return wait_deleted(context, operation)


def request_path(context: Context, name: str, zone: str) -> str:
    return f"{zone_path(context, zone)}/queuedResources/{name}"


def request_body(context: Context, name: str, spec: SliceSpec, place: Place) -> dict[str, Any]:
    """Return the body of a create request, with the fields that `gcloud compute tpus queued-resources create` sends."""
    where = zone_path(context, place.zone)
    node = {"node": node_body(context, name, spec, place), "nodeId": name, "parent": where}
    request: dict[str, Any] = {"tpu": {"nodeSpec": [node]}}
    if spec.valid_until_seconds is not None:
        request["queueingPolicy"] = {"validUntilDuration": f"{spec.valid_until_seconds:.0f}s"}
    match place.capacity:
        case "spot":
            request["spot"] = {}
        case "reserved":
            reservation = spec.reservation or ""
            full = "/" in reservation
            request["reservationName"] = reservation if full else f"{where}/reservations/{reservation}"
        case "flex_start":
            request["provisioningModel"] = "FLEX_START"
            request["runDuration"] = {"maxRunDuration": f"{FLEX_SECONDS}s"}
        case _:
            request["guaranteed"] = {}
    return request


def parse_request(queued: dict[str, Any], answer: dict[str, Any] | None, now: float) -> SliceStatus:
    """Return the status of a request with its node. The node's state wins where it says more than the request's."""
    where = queued["name"].split("/")[3]
    specs = queued.get("tpu", {}).get("nodeSpec") or [{}]
    name = f"projects/-/locations/{where}/nodes/{leaf(queued['name'])}"
    wanted = {**specs[0].get("node", {}), "name": name, "state": "UNKNOWN"}
    wanted.setdefault("schedulingConfig", {"spot": "spot" in queued, "reserved": "reservationName" in queued})
    current = parse_node(answer or wanted, "queued")
    told = queued.get("state", {})
    state = told.get("state", "STATE_UNSPECIFIED")
    failure = told.get("failedData", {}).get("error", {})
    if state == "ACTIVE":
        state = current.state if answer else "GONE"
    elif answer and state in ("SUSPENDED", "SUSPENDING") and current.state in ("PREEMPTED", "TERMINATED", "STOPPED"):
        state = current.state if state == "SUSPENDED" else state
    elif state in WAITING_STATES and has_expired(queued, now):
        state = "EXPIRED"
    return replace(
        current,
        state=state,
        pending=state in TRANSITIONAL_REQUEST_STATES
        or (answer is not None and state == current.state and current.pending),
        uid=current.uid if answer else "",
        created=parse_timestamp(queued.get("createTime")),
        running_since=current.running_since if answer else 0.0,
        code=code_name(failure) if failure else "",
        message=failure.get("message", ""),
    )


def has_expired(queued: dict[str, Any], now: float) -> bool:
    """Return whether a request has expired. Google keeps it in the queue, but will never serve it."""
    policy = queued.get("queueingPolicy", {})
    if duration := policy.get("validUntilDuration"):
        return now > parse_timestamp(queued.get("createTime")) + float(duration.rstrip("s"))
    until = policy.get("validUntilTime") or policy.get("validInterval", {}).get("endTime")
    return until is not None and now > parse_timestamp(until)

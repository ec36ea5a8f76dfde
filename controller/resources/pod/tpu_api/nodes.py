"""TPU nodes, created at once (https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes)."""

from dataclasses import dataclass
from typing import Any

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.errors import ConflictError, GoogleError, NotFoundError
from controller.gcp.names import LABEL, TAG, leaf
from controller.gcp.operations import OperationFailedError, poll_rpc, wait_rpc
from controller.gcp.timestamps import parse_timestamp
from controller.resources.pod import data_disk
from controller.resources.pod.provisioner import (
    DELETE_SECONDS,
    Endpoint,
    IsAnswered,
    Place,
    ProvisionerName,
    SliceSpec,
    SliceStatus,
    Symptom,
)
from controller.resources.pod.startup_script import STARTUP_SCRIPT, startup_script, switch_part

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
        try:
            return parse_node(_call(context, "get", name, zone))
        except NotFoundError:
            return None

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

    def delete(self, context: Context, name: str, zone: str, *, is_recorded: bool = False) -> None:
        late = context.clock.deadline(DELETE_SECONDS)
        while True:
            try:
                operation = _call(context, "delete", name, zone)
                if wait_deleted(context, operation):
                    return
            except NotFoundError:
                return
            except ConflictError:  # another operation on the node is under way, maybe another deletion
                if late():
                    raise
            context.clock.sleep(context.poll_seconds)


def wait_done(context: Context, operation: dict[str, Any], seconds: float) -> None:
    """Wait for an operation of the TPU API. Raises OperationFailedError."""
    wait_rpc(context, API, operation, "projects.locations.operations.get", seconds)


def wait_deleted(context: Context, operation: dict[str, Any]) -> bool:
    """Wait for a deletion; return False if its operation cannot be read, so that the caller must look by itself.

    Raises:
        OperationFailedError: Google did not delete it.
    """
    try:
        wait_done(context, operation, DELETE_SECONDS)
    except OperationFailedError:
        raise
    except GoogleError as error:
        context.events.note(operation["name"], f"cannot see how the deletion goes: {error}")
        return False
    return True


def _call(context: Context, method: str, name: str, zone: str, **options: Any) -> dict[str, Any]:
    return context.google.call(
        API, f"projects.locations.nodes.{method}", name=node_path(context, name, zone), **options
    )


def zone_path(context: Context, zone: str) -> str:
    return f"projects/{context.project}/locations/{zone}"


def node_path(context: Context, name: str, zone: str) -> str:
    return f"{zone_path(context, zone)}/nodes/{name}"


def node_body(context: Context, name: str, spec: SliceSpec, place: Place) -> dict[str, Any]:
    """Return the body of a create request, without the tier: what `gcloud compute tpus tpu-vm create` sends."""
    metadata = {"ssh-keys": "\n".join([context.ssh_login.key_line(), *context.extra_ssh_keys])}
    parts: list[str] = []
    node: dict[str, Any] = {
        "acceleratorType": spec.accelerator_type,
        "runtimeVersion": spec.runtime_version,
        "labels": {**LABEL, TIER_LABEL: place.capacity},
        "metadata": metadata,
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
        disk = f"projects/{context.project}/zones/{place.zone}/disks/{data_disk.name_for(name)}"
        node["dataDisks"] = [{"sourceDisk": disk, "mode": "READ_WRITE"}]
        parts.append(data_disk.mount_part(spec.data_disk_gb))
    if spec.heartbeat_timeout_seconds is not None:
        parts.append(switch_part(spec.heartbeat_timeout_seconds, deletions(context, name, place.zone)))
    if parts:
        metadata[STARTUP_SCRIPT] = startup_script(*parts)
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
            accelerator_type=answer.get("acceleratorType", ""),
            runtime_version=answer.get("runtimeVersion", ""),
            network=leaf(network.get("network", "")),
            external_ip=network.get("enableExternalIps", False),
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

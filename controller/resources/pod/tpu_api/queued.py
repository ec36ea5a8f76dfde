"""Queued resources: a request for a node that waits for capacity.

https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources. A request outlives its node and
keeps its name until it is deleted, even after it has expired, failed or lost its node.
"""

from dataclasses import dataclass, replace
from typing import Any

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.errors import ConflictError, GoogleError, NotFoundError
from controller.gcp.names import leaf
from controller.gcp.operations import code_name, wait_rpc
from controller.gcp.timestamps import parse_timestamp
from controller.resources.pod.pending_deletion import DeletionPendingError, PendingDeletion, record_deletion
from controller.resources.pod.provisioner import DELETE_SECONDS, WAITING_STATES, Place, SliceSpec, SliceStatus
from controller.resources.pod.tpu_api import nodes

FLEX_API = "tpu:v2alpha1"
"""The only API with flex-start, as of revision 20261001 of the discovery documents."""
FLEX_SECONDS = 7 * 24 * 3600
"""Longest lifetime of a flex-start slice: https://cloud.google.com/tpu/docs/about-flex-start"""
PROVISIONING_SECONDS = 120.0
"""Wait for a request that Google does not delete because it is PROVISIONING; that may last for hours."""
DELETION_PENDING = (
    "queued resource {name} in {zone} is being provisioned, and Google does not delete it in that state. Its "
    "deletion is on record: the next `slipway` up, status, down or orphans tries again"
)
TRANSITIONAL_STATES = WAITING_STATES | {"PROVISIONING", "DELETING", "SUSPENDING", "STATE_UNSPECIFIED"}


@dataclass(frozen=True)
class QueuedProvisioner:
    """Creates slices with `queuedResources.create`; the request and its node both have the pod's name."""

    create_seconds: float

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        try:
            queued = context.google.call(
                "tpu", "projects.locations.queuedResources.get", name=request_path(context, name, zone)
            )
        except NotFoundError:
            return None
        try:
            answer = context.google.call(
                "tpu", "projects.locations.nodes.get", name=nodes.node_path(context, name, zone)
            )
        except NotFoundError:
            answer = None
        return parse_request(queued, answer, context.clock.now())

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> None:
        api = FLEX_API if place.capacity == "flex_start" else "tpu"
        operation = context.google.call(
            api,
            "projects.locations.queuedResources.create",
            parent=nodes.zone_path(context, place.zone),
            queuedResourceId=name,
            body=request_body(context, name, spec, place),
        )
        wait_rpc(context, "tpu", operation, "projects.locations.operations.get", self.create_seconds)

    def delete(self, context: Context, name: str, zone: str, *, is_recorded: bool = False) -> None:
        """Delete the request with its node.

        Args:
            context: the run's context.
            name: of the pod.
            zone: where it is.
            is_recorded: its deletion is on record already, so one attempt is enough while it is PROVISIONING.

        Raises:
            DeletionPendingError: it is still PROVISIONING. Its deletion is on record then.
        """
        late = context.clock.deadline(DELETE_SECONDS)
        give_up = context.clock.deadline(0.0 if is_recorded else PROVISIONING_SECONDS)
        while (found := self.observe(context, name, zone)) is not None:
            if late():
                raise CloudError(
                    f"queued resource {name} in {zone} was not deleted: it is still {found.state.lower()}, and Google "
                    "may yet create its node. Run `slipway down` again later; until then `slipway orphans` lists it"
                )
            try:
                if found.state != "DELETING" and self._delete(context, name, zone):
                    continue
            except NotFoundError:
                break
            except GoogleError as error:  # the node has just appeared, or another operation is under way on it
                if not isinstance(error, ConflictError) and error.reason not in ("FAILED_PRECONDITION", "ABORTED"):
                    raise
                if found.state == "PROVISIONING" and give_up() and (is_recorded or self._record(context, name, zone)):
                    raise DeletionPendingError(DELETION_PENDING.format(name=name, zone=zone)) from error
            context.clock.sleep(context.poll_seconds)
        maker = nodes.NodeProvisioner(self.create_seconds)
        if maker.observe(context, name, zone) is not None:  # a node that outlived its request
            maker.delete(context, name, zone)

    def _record(self, context: Context, name: str, zone: str) -> bool:
        """Record that the request is to be deleted; False if it no longer exists."""
        method = "projects.locations.queuedResources.get"
        try:
            created = context.google.call("tpu", method, name=request_path(context, name, zone)).get("createTime", "")
        except NotFoundError:
            return False
        now = context.clock.now()
        record_deletion(context, PendingDeletion(context.project, zone, name, created, now, context.bucket))
        return True

    def _delete(self, context: Context, name: str, zone: str) -> bool:
        """Delete the request and its node, which may appear at any moment; return whether that is known to be done."""
        operation = context.google.call(
            "tpu", "projects.locations.queuedResources.delete", name=request_path(context, name, zone), force=True
        )
        return nodes.wait_deleted(context, operation)


def request_path(context: Context, name: str, zone: str) -> str:
    return f"{nodes.zone_path(context, zone)}/queuedResources/{name}"


def request_body(context: Context, name: str, spec: SliceSpec, place: Place) -> dict[str, Any]:
    """Return the body of a create request, with the fields that `gcloud compute tpus queued-resources create` sends."""
    where = nodes.zone_path(context, place.zone)
    node = {"node": nodes.node_body(context, name, spec, place), "nodeId": name, "parent": where}
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
    current = nodes.parse_node(answer or wanted, "queued")
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
        pending=state in TRANSITIONAL_STATES or (answer is not None and state == current.state and current.pending),
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

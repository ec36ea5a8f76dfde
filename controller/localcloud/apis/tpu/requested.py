"""What a queued resource asks for: its nodes, its tier, and whether it holds quota."""

from collections.abc import Mapping
from typing import Any

from controller.localcloud.store import Document

NO_LONGER_HELD = ("FAILED", "SUSPENDED")
"""States of a request whose resources are deleted, by the API's description of SUSPENDED."""


def holds_quota(queued: Document) -> bool:
    """Return whether a request counts against the quota for TPUs: from its creation until its resources are gone."""
    return queued["state"]["state"] not in NO_LONGER_HELD


def multi_slice_spec(spec: Document) -> Document | None:
    """Return the multislice parameters of a nodeSpec, if any; v2alpha1 names them differently."""
    return spec.get("multisliceParams") or spec.get("multiNodeParams")


def capacity_tier(queued: Mapping[str, Any]) -> str:
    """Return the tier that a request asks for."""
    if queued.get("provisioningModel") == "FLEX_START":
        return "flex_start"
    return "spot" if "spot" in queued else "reserved" if "reservationName" in queued else "on_demand"


def requested_nodes(queued: Document) -> list[tuple[str, dict[str, Any]]]:
    """Return (node ID, node) for every node of a request, with its tier as the node's schedulingConfig."""
    scheduling = {"spot": "spot" in queued, "preemptible": False, "reserved": "reservationName" in queued}
    wanted = []
    for spec in queued["tpu"]["nodeSpec"]:
        body = {"schedulingConfig": scheduling, **spec["node"]}
        slices = multi_slice_spec(spec)
        if slices:
            prefix = slices.get("nodeIdPrefix") or queued["name"].rpartition("/")[2]
            wanted += [(f"{prefix}-{index}", body) for index in range(int(slices["nodeCount"]))]
        else:
            wanted.append((spec["nodeId"], body))
    return wanted


def state_document(state: str, initiator: str = "SERVICE") -> Document:
    """Return the state of a request as the API shows it; `initiator` is USER where the user deleted its nodes."""
    data = {} if state == "WAITING_FOR_RESOURCES" else {f"{state.lower()}Data": {}}
    return {"state": state, "stateInitiator": initiator, **data}

"""What Compute Engine reports becomes a state that the rest of Slipway knows."""

from __future__ import annotations

from typing import Any

import pytest

from controller.resources.pod.compute_engine import states
from controller.resources.pod.compute_engine.states import Group
from controller.resources.pod.provisioner import Endpoint
from tests.controller.resources.pod.compute_engine.test_bodies import ZONE

STOCK_OUT = ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "The zone does not have enough resources available")
QUOTA = ("QUOTA_EXCEEDED", "Quota 'TPUS_PER_TPU_FAMILY' exceeded.")
SCOPES = "https://www.googleapis.com/auth"
FAULT = ("INTERNAL_ERROR", "Internal error")


def group(topology: str, *vms: dict[str, Any], size: int = 2, model: str = "SPOT") -> Group:
    shown = [{"acceleratorTopology": "2x4", "state": topology}] if topology else []
    manager = {
        "name": "pod", "id": "7", "targetSize": size, "description": "made by slipway for pod",
        "creationTimestamp": "2026-11-20T00:00:00Z", "status": {"appliedAcceleratorTopologies": shown},
    }  # fmt: skip
    return Group(manager, vms, [instance(f"pod-{i}", model) for i, vm in enumerate(vms) if "instanceStatus" in vm])


def managed(name: str, status: str = "RUNNING", action: str = "NONE", *errors: tuple[str, str]) -> dict[str, Any]:
    """Return an entry of `listManagedInstances`."""
    found: dict[str, Any] = {"instance": f"zones/{ZONE}/instances/{name}", "currentAction": action}
    if status:
        found["instanceStatus"] = status
    if errors:
        found["lastAttempt"] = {"errors": {"errors": [{"code": code, "message": text} for code, text in errors]}}
    return found


def instance(name: str, model: str = "SPOT", status: str = "RUNNING", **metadata: str) -> dict[str, Any]:
    return {
        "name": name, "id": "9", "status": status, "zone": f"zones/{ZONE}", "scheduling": {"provisioningModel": model},
        "machineType": f"zones/{ZONE}/machineTypes/ct6e-standard-4t", "labels": {"managed-by": "slipway"},
        "networkInterfaces": [{"networkIP": f"10.0.0.{name[-1]}", "subnetwork": "regions/us-east5/subnetworks/sub1"}],
        "metadata": {"items": [{"key": key.replace("_", "-"), "value": value} for key, value in metadata.items()]},
    }  # fmt: skip


UP, GONE = managed("a"), managed("a", "")
ENDED, WAITS = managed("a", "TERMINATED"), managed("a", "PENDING", "CREATING")
BOOTS = managed("a", "STAGING", "CREATING")


@pytest.mark.parametrize(
    ("found", "state", "pending"),
    [
        (group("", size=0), "GONE", False),
        (group("", size=2), "WAITING_FOR_RESOURCES", True),
        (group("INCOMPLETE", WAITS, WAITS), "WAITING_FOR_RESOURCES", True),
        (group("", managed("a", "PENDING", "CREATING", STOCK_OUT), WAITS), "WAITING_FOR_RESOURCES", True),
        (group("", managed("a", "PENDING", "CREATING", QUOTA), WAITS), "FAILED", False),
        (group("INCOMPLETE", managed("a", "STAGING", "CREATING", FAULT), BOOTS), "FAILED", False),
        (group("INCOMPLETE", BOOTS, BOOTS), "PROVISIONING", True),
        (group("ACTIVATING", UP, UP), "PROVISIONING", True),
        (group("INCOMPLETE", UP, UP), "PROVISIONING", True),
        (group("ACTIVE", UP, UP), "READY", False),
        (group("ACTIVE_DEGRADED", UP, UP), "READY", False),
        (group("FAILED", UP, UP), "FAILED", False),
        (group("ACTIVE_DEGRADED", UP, ENDED), "PREEMPTED", False),
        (group("INCOMPLETE", UP, GONE), "PREEMPTED", False),
        (group("INCOMPLETE", UP, ENDED, model="STANDARD"), "TERMINATED", False),
        (group("DEACTIVATING", UP, ENDED, model="STANDARD"), "REPAIRING", True),
        (group("REACTIVATING", UP, ENDED, model="STANDARD"), "REPAIRING", True),
        (group("DEACTIVATING", UP, UP), "STOPPING", True),
        (group("ACTIVE", managed("a", "RUNNING", "DELETING"), UP), "DELETING", True),
    ],
)  # fmt: skip
def test_a_group_and_its_vms_have_one_state(found: Group, state: str, pending: bool) -> None:
    status = states.parse_group(found, ZONE)
    assert (status.state, status.pending) == (state, pending)
    assert status.name == "pod"
    assert status.place.zone == ZONE
    assert status.is_labelled


def test_a_ready_group_says_what_it_is() -> None:
    status = states.parse_group(group("ACTIVE", UP, UP), ZONE)
    assert (status.spec.accelerator_type, status.spec.workers) == ("v6e-8", 2)
    assert (status.place.capacity, status.place.subnetwork, status.place.provisioner) == ("spot", "sub1", "mig")
    assert status.endpoints == (Endpoint(0, "10.0.0.0", None, "pod-0"), Endpoint(1, "10.0.0.1", None, "pod-1"))
    assert status.uid == "72026-11-20T00:00:00Z"
    waiting = states.parse_group(group("", WAITS, WAITS), ZONE)
    assert waiting.uid == ""


def test_a_group_whose_vms_are_deleted_is_still_the_slice_that_was_given() -> None:
    lost = states.parse_group(group("INCOMPLETE", GONE, GONE), ZONE)
    assert (lost.state, lost.endpoints, lost.uid) == ("TERMINATED", (), "72026-11-20T00:00:00Z")
    failed = states.parse_group(group("", managed("a", "", "CREATING", QUOTA)), ZONE)
    assert (failed.state, failed.uid) == ("FAILED", "")


def test_a_degraded_topology_is_unhealthy_and_a_failure_has_googles_words() -> None:
    assert states.parse_group(group("ACTIVE_DEGRADED", UP, UP), ZONE).health == "UNHEALTHY_TOPOLOGY"
    failed = states.parse_group(group("", managed("a", "PENDING", "CREATING", QUOTA), WAITS), ZONE)
    assert (failed.code, failed.message) == QUOTA
    manager = {**group("FAILED", UP, UP).manager}
    manager["status"]["appliedAcceleratorTopologies"][0]["stateDetails"] = {
        "error": {"errors": [{"code": "X", "message": "a link is down"}]}
    }
    assert states.failure_of(Group(manager, [], [])) == ("X", "a link is down")


@pytest.mark.parametrize(
    ("status", "model", "state", "pending"),
    [
        ("PENDING", "FLEX_START", "WAITING_FOR_RESOURCES", True),
        ("PROVISIONING", "SPOT", "PROVISIONING", True),
        ("STAGING", "SPOT", "PROVISIONING", True),
        ("RUNNING", "SPOT", "READY", False),
        ("REPAIRING", "STANDARD", "REPAIRING", True),
        ("STOPPING", "SPOT", "STOPPING", True),
        ("TERMINATED", "SPOT", "PREEMPTED", False),
        ("TERMINATED", "STANDARD", "STOPPED", False),
    ],
)
def test_the_state_of_one_vm(status: str, model: str, state: str, pending: bool) -> None:
    found = states.parse_instance(instance("pod", model, status))
    assert (found.state, found.pending) == (state, pending)
    assert (found.spec.accelerator_type, found.spec.workers) == ("v6e-4", 1)
    assert bool(found.uid) == (state != "WAITING_FOR_RESOURCES")


def test_workers_are_in_googles_order() -> None:
    a, b, c = (instance(f"pod-{name}") for name in "abc")
    assert [vm["name"] for vm in states.in_order([c, a, b])] == ["pod-a", "pod-b", "pod-c"]
    named = instance("pod-a", worker_network_endpoints="pod-c,pod-a,pod-b")
    assert [vm["name"] for vm in states.in_order([named, b, c])] == ["pod-c", "pod-a", "pod-b"]
    by_id = [
        instance(f"pod-{n}", tpu_env=f"TPU_WORKER_ID: '{i}'\nZONE: 'z'") for n, i in (("a", 2), ("b", 0), ("c", 1))
    ]
    assert [vm["name"] for vm in states.in_order(by_id)] == ["pod-b", "pod-c", "pod-a"]


def test_vms_with_tpus_are_known_by_their_type() -> None:
    assert all(map(states.is_tpu, ("ct6e-standard-4t", "tpu7x-standard-4t", "ct5p-hightpu-4t", "ct5lp-hightpu-1t")))
    assert not any(map(states.is_tpu, ("e2-small", "c3-standard-4", "")))


@pytest.mark.parametrize(
    ("accounts", "missing"),
    [
        ([], "no service account"),
        ([{"email": "a@b", "scopes": [f"{SCOPES}/devstorage.read_only"]}], "no access scopes with which it may write"),
        ([{"email": "a@b", "scopes": [f"{SCOPES}/devstorage.read_write"]}], ""),
        ([{"email": "a@b", "scopes": [f"{SCOPES}/cloud-platform"]}], ""),
    ],
)
def test_a_vm_that_cannot_use_the_bucket_says_why(accounts: list[dict[str, Any]], missing: str) -> None:
    found = states.parse_instance({**instance("pod"), "serviceAccounts": accounts}).obstacle
    assert missing in found
    assert bool(missing) == bool(found) == ("set-service-account pod --zone=us-east5-b" in found)

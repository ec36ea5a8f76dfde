"""What is sent to Compute Engine, by its discovery document, and what its answers mean to the rest of Slipway."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.context import Context
from controller.localcloud.http.discovery import Method, Validation, load_discovery
from controller.resources.pod import instance_bodies, instance_states
from controller.resources.pod.instance_bodies import WISHES, VmSpec, vm_spec
from controller.resources.pod.instance_states import Group
from controller.resources.pod.provisioner import Endpoint, Place, SliceSpec
from tests.fakes.context import make_context

ZONE = "us-east5-b"
SPEC = SliceSpec(
    workers=2,
    accelerator_type="v6e-8",
    runtime_version="ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    network="net1",
    external_ip=False,
    service_account="sa",
    own=VmSpec("ct6e-standard-4t", "2x4", boot_disk_gb=200),
    data_disk_kind="hyperdisk-balanced",
)
PLACE = Place(ZONE, "spot", "sub1", "mig")
DELETED = {"instanceTerminationAction": "DELETE"}
INSTANCE = Place(ZONE, "on_demand", "sub1", "instance")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    google = SimpleNamespace(root=lambda api: f"https://{api}.googleapis.com/")
    return make_context(google, tmp_path, project="p1")


@pytest.mark.parametrize("tier", ["on_demand", "spot", "flex_start", "reserved"])
def test_every_tier_is_valid_by_the_discovery_document(context: Context, tier: str) -> None:
    spec = replace(SPEC, own=replace(vm_spec(SPEC), max_run_seconds=7200.0), reservation="mine")
    spec = replace(spec, heartbeat_timeout_seconds=7200.0)
    place = replace(PLACE, capacity=tier)
    one = instance_bodies.instance_body(context, "pod", replace(spec, workers=1, data_disk_gb=100), place)
    template = instance_bodies.template_body(context, "pod", spec, place)
    sent = {
        "Instance": one,
        "InstanceTemplate": template,
        "ResourcePolicy": instance_bodies.policy_body("pod", spec),
        "InstanceGroupManager": instance_bodies.group_body(context, "pod", spec, place, template["name"]),
    }
    validation = Validation(load_discovery())
    for schema, body in sent.items():
        validation.check_body(Method("compute.v1", "", "POST", schema, None, {}), body)
    affinities = {"reserved": "SPECIFIC_RESERVATION", "flex_start": "NO_RESERVATION"}
    for body in (one, template["properties"]):
        assert body.get("reservationAffinity", {}).get("consumeReservationType") == affinities.get(tier)
    source = f"projects/p1/zones/{ZONE}/disks/pod-data"
    assert one["disks"][1] == {"source": source, "mode": "READ_WRITE", "boot": False, "autoDelete": False}
    region = "https://compute.googleapis.com/compute/v1/projects/p1/regions/us-east5"
    policy = {"workloadPolicy": f"{region}/resourcePolicies/pod-2x4"}
    assert sent["InstanceGroupManager"]["resourcePolicies"] == policy
    own = instance_bodies.vm_properties(
        context, "pod", replace(SPEC, runtime_version="projects/x/global/images/y"), PLACE
    )
    assert own["disks"][0]["initializeParams"]["sourceImage"] == "projects/x/global/images/y"
    for hours, seconds in {None: "7200", 0.001: "90", 1.0: "3600", 24.0: "7200"}.items():
        waits = replace(spec, valid_until_seconds=None if hours is None else 3600 * hours)
        params = instance_bodies.instance_body(context, "pod", waits, place).get("params")
        assert params == ({"requestValidForDuration": {"seconds": seconds}} if tier == "flex_start" else None)


@pytest.mark.parametrize(
    ("tier", "limit", "wanted"),
    [
        ("on_demand", None, {"provisioningModel": "STANDARD"}),
        (
            "on_demand", 7200.0,
            {"provisioningModel": "STANDARD", "maxRunDuration": {"seconds": "7200"}, **DELETED},
        ),
        (
            "spot", None,
            {"provisioningModel": "SPOT", "automaticRestart": False, "preemptionNoticeDuration": {"seconds": "120"},
             **DELETED},
        ),
        ("reserved", None, {"provisioningModel": "RESERVATION_BOUND", **DELETED}),
        (
            "flex_start", 60.0,
            {"provisioningModel": "FLEX_START", "maxRunDuration": {"seconds": "600"}, **DELETED},
        ),
    ],
)  # fmt: skip
def test_the_tier_and_the_end_of_a_vm(tier: str, limit: float | None, wanted: dict[str, Any]) -> None:
    found = instance_bodies.scheduling(VmSpec(max_run_seconds=limit), tier)
    assert found == {"onHostMaintenance": "TERMINATE", **wanted}


@pytest.mark.parametrize("tier", ["on_demand", "spot", "flex_start", "reserved"])
def test_what_google_refused_is_left_out_and_nothing_else(context: Context, tier: str) -> None:
    place, spec = replace(PLACE, capacity=tier), replace(SPEC, own=replace(vm_spec(SPEC), max_run_seconds=7200.0))
    full = instance_bodies.vm_properties(context, "pod", spec, place)
    modest = instance_bodies.vm_properties(context, "pod", replace(spec, without=frozenset(WISHES)), place)
    had = {wish for wish, (of, _) in WISHES.items() if of == tier}
    assert {*full, *full["scheduling"]} - {*modest, *modest["scheduling"]} == had
    assert modest == {key: modest[key] for key in full if key in modest}


def test_a_template_is_named_by_its_content_and_names_fit(context: Context) -> None:
    name = "p" * 63
    first, again = (instance_bodies.template_body(context, name, SPEC, PLACE)["name"] for _ in range(2))
    larger = replace(SPEC, own=replace(vm_spec(SPEC), boot_disk_gb=300))
    assert first == again != instance_bodies.template_body(context, name, larger, PLACE)["name"]
    assert len(first) == 63
    group = instance_bodies.group_body(context, name, SPEC, PLACE, first)
    assert len(group["baseInstanceName"]) <= 58
    assert len(instance_bodies.policy_name(name, replace(SPEC, own=VmSpec(shape="16x24x24")))) <= 63


def test_a_pod_that_nobody_uses_deletes_its_group_and_not_a_vm_of_it(context: Context) -> None:
    properties = instance_bodies.vm_properties(context, "pod", replace(SPEC, heartbeat_timeout_seconds=7200.0), PLACE)
    [script] = [item["value"] for item in properties["metadata"]["items"] if item["key"] == "startup-script"]
    where = "https://compute.googleapis.com/compute/v1/projects/p1/zones/us-east5-b"
    assert f"7200 {where}/instanceGroupManagers/pod {where}/instances/pod <" in script


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


def lagging(found: Group) -> Group:
    """Return a group of which the list of instances does not have the last VM yet."""
    return replace(found, instances=found.instances[:-1])


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
        (group("", UP, UP), "READY", False),  # Google does not show the topology
        (group("", UP, UP, model="STANDARD"), "READY", False),
        (group("", UP, BOOTS), "PROVISIONING", True),
        (group("", UP, managed("a", "RUNNING", "VERIFYING")), "PROVISIONING", True),
        (group("", UP, managed("a", "REPAIRING"), model="STANDARD"), "REPAIRING", True),
        (group("", UP, ENDED, model="STANDARD"), "TERMINATED", False),
        (lagging(group("ACTIVE", UP, UP)), "PROVISIONING", True),
        (lagging(group("", UP, UP)), "PROVISIONING", True),
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
    status = instance_states.parse_group(found, ZONE)
    assert (status.state, status.pending) == (state, pending)
    assert status.name == "pod"
    assert status.place.zone == ZONE
    assert status.is_labelled


def test_a_group_whose_vms_are_deleted_is_still_the_slice_that_was_given() -> None:
    lost = instance_states.parse_group(group("INCOMPLETE", GONE, GONE), ZONE)
    assert (lost.state, lost.endpoints, lost.uid) == ("TERMINATED", (), "72026-11-20T00:00:00Z")
    failed = instance_states.parse_group(group("", managed("a", "", "CREATING", QUOTA)), ZONE)
    assert (failed.state, failed.uid) == ("FAILED", "")
    ready = instance_states.parse_group(group("ACTIVE", UP, UP), ZONE)
    assert ready.endpoints == (Endpoint(0, "10.0.0.0", None, "pod-0"), Endpoint(1, "10.0.0.1", None, "pod-1"))
    assert (ready.uid, instance_states.parse_group(group("", WAITS, WAITS), ZONE).uid) == (lost.uid, "")


def test_a_degraded_topology_is_unhealthy_and_a_failure_has_googles_words() -> None:
    assert instance_states.parse_group(group("ACTIVE_DEGRADED", UP, UP), ZONE).health == "UNHEALTHY_TOPOLOGY"
    failed = instance_states.parse_group(group("", managed("a", "PENDING", "CREATING", QUOTA), WAITS), ZONE)
    assert (failed.code, failed.message) == QUOTA
    manager = {**group("FAILED", UP, UP).manager}
    manager["status"]["appliedAcceleratorTopologies"][0]["stateDetails"] = {
        "error": {"errors": [{"code": "X", "message": "a link is down"}]}
    }
    assert instance_states.failure_of(Group(manager, [], [])) == ("X", "a link is down")


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
    found = instance_states.parse_instance(instance("pod", model, status))
    assert (found.state, found.pending) == (state, pending)
    assert (found.spec.accelerator_type, found.spec.workers) == ("v6e-4", 1)
    assert bool(found.uid) == (state != "WAITING_FOR_RESOURCES")


def test_workers_are_in_googles_order() -> None:
    a, b, c = (instance(f"pod-{name}") for name in "abc")
    assert [vm["name"] for vm in instance_states.in_order([c, a, b])] == ["pod-a", "pod-b", "pod-c"]
    named = instance("pod-a", worker_network_endpoints="pod-c,pod-a,pod-b")
    assert [vm["name"] for vm in instance_states.in_order([named, b, c])] == ["pod-c", "pod-a", "pod-b"]
    by_id = [
        instance(f"pod-{n}", tpu_env=f"TPU_WORKER_ID: '{i}'\nZONE: 'z'") for n, i in (("a", 2), ("b", 0), ("c", 1))
    ]
    assert [vm["name"] for vm in instance_states.in_order(by_id)] == ["pod-b", "pod-c", "pod-a"]


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
    found = instance_states.parse_instance({**instance("pod"), "serviceAccounts": accounts}).obstacle
    assert missing in found
    assert bool(missing) == bool(found) == ("set-service-account pod --zone=us-east5-b" in found)

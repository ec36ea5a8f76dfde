"""Single TPU instances: made, reached over SSH, stopped and started, told of preemptions, refused, without capacity."""

from typing import Any

import pytest

from tests.controller.localcloud.apis.compute_engine.slices import FLEX, SPOT, ZONAL, ask, lone, run
from tests.controller.localcloud.harness import INSTANCES, LARGE_QUOTAS, EmulatedCloud, wait_for

pytestmark = pytest.mark.usefixtures("net")
CONDITION = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"


def status(cloud: EmulatedCloud, name: str) -> str:
    return cloud.call_ok("GET", f"{INSTANCES}/{name}")["status"]


def create(cloud: EmulatedCloud, name: str, machine: str = "ct6e-standard-1t", **more: Any) -> None:
    done = cloud.call_and_wait("POST", INSTANCES, lone(cloud, name, machine, **more))
    assert "error" not in done, done


def test_an_instance_lives_stops_starts_and_is_deleted(cloud: EmulatedCloud) -> None:
    create(cloud, "one", "ct6e-standard-8t")
    instance, root = cloud.call_ok("GET", f"{INSTANCES}/one"), cloud.endpoint["url"]
    assert instance["status"] == "RUNNING"
    assert instance["machineType"] == f"{root}{ZONAL}/machineTypes/ct6e-standard-8t"
    assert instance["networkInterfaces"][0]["network"].startswith(f"{root}compute/v1/projects/")
    assert run(cloud, "one", "ls $SLIPWAY_DEV/vfio; echo kept > file").split() == [*"01234567", "vfio"]
    assert ask(cloud, "one", "attributes/worker-network-endpoints") == "one"
    assert ask(cloud, "one", "preempted") == "FALSE"
    cloud.call_and_wait("POST", f"{INSTANCES}/one/stop")
    assert status(cloud, "one") == "TERMINATED"
    cloud.script({"kind": "stockout", "plane": "compute_engine"})
    error = cloud.call_and_wait("POST", f"{INSTANCES}/one/start")["error"]["errors"][0]
    assert error["code"] == CONDITION
    assert status(cloud, "one") == "TERMINATED", "it can be started later"
    cloud.call_and_wait("POST", f"{INSTANCES}/one/start")
    assert run(cloud, "one", "cat file") == "kept\n"
    cloud.delete(f"{INSTANCES}/one")
    assert not cloud.call_ok("GET", "emulator/state").get("slice")


def test_metadata_is_changed_under_its_fingerprint_and_may_enable_guest_attributes(cloud: EmulatedCloud) -> None:
    create(cloud, "told", metadata={"items": [{"key": "ssh-keys", "value": f"me:{cloud.public_key} me"}]})
    path = f"{INSTANCES}/told/getGuestAttributes?queryPath=hostkeys/"
    words = "The resource 'hostkeys/' of type 'Guest Attribute' was not found."
    assert cloud.refused("GET", path, None, 404) == words
    metadata = cloud.call_ok("GET", f"{INSTANCES}/told")["metadata"]
    more = [{"key": "colour", "value": "red"}, {"key": "enable-guest-attributes", "value": "TRUE"}]
    added = {"items": [*metadata["items"], *more], "fingerprint": metadata["fingerprint"]}
    cloud.call_and_wait("POST", f"{INSTANCES}/told/setMetadata", added)
    assert ask(cloud, "told", "attributes/colour") == "red", "its host key is published"
    cloud.refused("POST", f"{INSTANCES}/told/setMetadata", added, 412, "conditionNotMet")
    cloud.refused("POST", f"{INSTANCES}/told/setMetadata", {"items": added["items"]}, 412, "conditionNotMet")
    cloud.refused("POST", f"{INSTANCES}/told/setLabels", {"labels": {"a": "b"}}, 412, "conditionNotMet")
    cloud.delete(f"{INSTANCES}/told")


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({}, ("MIGRATE", "STANDARD", False, True)),
        ({"provisioningModel": "SPOT"}, ("MIGRATE", "SPOT", True, False)),
        ({"provisioningModel": "STANDARD", "automaticRestart": False}, ("MIGRATE", "STANDARD", False, False)),
    ],
)
def test_a_vm_shows_the_defaults_that_it_was_not_asked_for(
    cloud: EmulatedCloud, asked: dict[str, Any], shown: tuple[Any, ...]
) -> None:
    path = f"{INSTANCES}/small"
    body = lone(cloud, "small", "e2-small", scheduling=asked, shieldedInstanceConfig={"enableSecureBoot": True})
    cloud.call_and_wait("POST", INSTANCES, body)
    vm = cloud.call_ok("GET", path)
    names = ("onHostMaintenance", "provisioningModel", "preemptible", "automaticRestart")
    assert tuple(vm["scheduling"][name] for name in names) == shown
    assert set(vm["shieldedInstanceConfig"].values()) == {True}
    assert vm["tags"]["fingerprint"]
    cloud.delete(path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"scheduling": {"maxRunDuration": {"seconds": "600"}}}, "A termination action must be specified"),
        (
            {"scheduling": {"provisioningModel": "SPOT", "automaticRestart": True}},
            "must have automaticRestart be false",
        ),
        ({"disks": [{"boot": False, "source": "x"}]}, "No disks are specified."),
        ({"disks": [{"boot": True}]}, "A source image or a disk must be specified."),
    ],
)
def test_a_vm_without_a_tpu_is_looked_at_as_closely(cloud: EmulatedCloud, more: dict[str, Any], words: str) -> None:
    cloud.refused("POST", INSTANCES, lone(cloud, "small", "e2-small", **more), 400, words)


@pytest.mark.parametrize(
    ("machine", "changed", "words"),
    [
        ("ct5lp-hightpu-4t", {}, "This user agent is not allowed to use the machine type ct5lp-hightpu-4t."),
        ("tpu7x-standard-4t", {}, "Invalid machine type tpu7x-standard-4t in zone us-central1-a."),
        ("ct6e-standard-4t", {"scheduling": {}}, "Instances with guest accelerators do not support live migration."),
        (
            "ct6e-standard-4t",
            {"scheduling": {"provisioningModel": "FLEX_START", "onHostMaintenance": "TERMINATE"}},
            "Max run duration must be specified with the FLEX_START provisioning model.",
        ),
        ("ct6e-standard-4t", {"disks": []}, "No disks are specified."),
        (
            "ct6e-standard-4t",
            {"resourcePolicies": ["projects/slipway-local/regions/us-central1/resourcePolicies/any"]},
            "Resource policy must have one of [VmMaintenancePolicy, GroupPlacementPolicy, InstanceSchedulePolicy]",
        ),
    ],
)
def test_what_google_refuses(cloud: EmulatedCloud, machine: str, changed: dict[str, Any], words: str) -> None:
    cloud.refused("POST", INSTANCES, lone(cloud, "refused", machine, **changed), 400, words)
    cloud.refused("GET", f"{INSTANCES}/refused", None, 404)
    assert not cloud.call_ok("GET", "emulator/state").get("slice")


def test_the_pools_of_the_two_planes_are_apart(cloud: EmulatedCloud) -> None:
    none = {"tpus-per-tpu-family-ct6e": 0, "preemptible-tpu-v6e": 8, "tpu-v6e": 0}
    with cloud.settings(quotas={**LARGE_QUOTAS, **none}):
        words = "Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region us-central1."
        assert cloud.refused("POST", INSTANCES, lone(cloud, "lone"), 403) == words
        create(cloud, "lone", "ct6e-standard-4t", scheduling=FLEX)  # flex-start draws on the other
        wait_for(lambda: status(cloud, "lone") == "RUNNING", "the VM")
        cloud.delete(f"{INSTANCES}/lone")


def test_a_flex_start_vm_is_pending_until_its_request_is_no_longer_valid(cloud: EmulatedCloud) -> None:
    cloud.script({"kind": "stockout", "times": 100_000, "capacity": "flex_start"})
    create(cloud, "late", "ct6e-standard-4t", scheduling=FLEX)
    assert status(cloud, "late") == "PENDING"
    cloud.delete(f"{INSTANCES}/late")
    short = {"params": {"requestValidForDuration": {"seconds": "0"}}}
    cloud.call_ok("POST", INSTANCES, lone(cloud, "late", scheduling=FLEX) | short)
    wait_for(lambda: cloud.call("GET", f"{INSTANCES}/late")[0] == 404, "the request has ended")


def test_a_stock_out_of_a_single_vm_is_the_error_of_its_operation(cloud: EmulatedCloud) -> None:
    cloud.script({"kind": "stockout", "capacity": "spot", "zone": "us-central1-a"})
    body = lone(cloud, "none", scheduling=SPOT)
    error = cloud.call_and_wait("POST", INSTANCES, body)["error"]["errors"][0]
    assert error["code"] == CONDITION
    assert "A ct6e-standard-4t VM instance is currently unavailable in the us-central1-a zone." in error["message"]
    cloud.refused("GET", f"{INSTANCES}/none", None, 404)
    cloud.script({"kind": "type_denied", "accelerator_type": "v6e-4", "plane": "compute_engine"})
    words = "This user agent is not allowed to use the machine type ct6e-standard-4t."
    assert cloud.refused("POST", INSTANCES, body, 400) == words

"""How slices come and go: states on the way, shortages, failures, preemptions, reactivation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import deep
from tests.controller.localcloud.apis.compute_engine.slices import (
    GROUPS,
    INSTANCES,
    ZONAL,
    create_group,
    managed,
    message,
    prepare_group,
    properties,
    run,
    script,
    topology_state,
    wait_for_state,
)
from tests.controller.localcloud.harness import LARGE_QUOTAS, EmulatedCloud, wait_for

SPOT = {"provisioningModel": "SPOT", "onHostMaintenance": "TERMINATE", "instanceTerminationAction": "STOP"}
FLEX = {
    "provisioningModel": "FLEX_START",
    "onHostMaintenance": "TERMINATE",
    "instanceTerminationAction": "DELETE",
    "maxRunDuration": {"seconds": "3600"},
}


@pytest.fixture(scope="module")
def network(cloud: EmulatedCloud) -> str:
    cloud.create_network("net")
    return "net"


@pytest.fixture(autouse=True)
def no_faults_remain(cloud: EmulatedCloud) -> Iterator[None]:
    yield
    cloud.call_ok("DELETE", "emulator/faults")
    cloud.call_ok("POST", "emulator/settings", {"quotas": LARGE_QUOTAS, "operation_seconds": 0.02})


def delete(cloud: EmulatedCloud, name: str) -> None:
    done = cloud.call_and_wait("DELETE", f"{GROUPS}/{name}")
    assert "error" not in done, done


def statuses(cloud: EmulatedCloud, name: str) -> list[str]:
    return [one.get("instanceStatus", "") for one in managed(cloud, name)]


def test_vms_are_pending_staged_and_running_before_the_topology_is_active(cloud: EmulatedCloud, network: str) -> None:
    cloud.call_ok("POST", "emulator/settings", {"operation_seconds": 0.4})
    prepare_group(cloud, "steps", network)
    cloud.call_and_wait("POST", f"{GROUPS}/steps/resize?size=2")
    seen: list[tuple[str, str]] = []

    def look() -> bool:
        group = cloud.call_ok("GET", f"{GROUPS}/steps")
        counts = group["status"]["currentInstanceStatuses"]
        assert sum(counts.values()) == 2
        state = (next(iter(counts)), topology_state(group))
        if not seen or seen[-1] != state:
            seen.append(state)
        return state[1] == "ACTIVE"

    wait_for(look, "the topology is ACTIVE")
    order = [("pending", "ACTIVATING"), ("staging", "ACTIVATING"), ("running", "ACTIVATING"), ("running", "ACTIVE")]
    assert [state for state in order if state in seen] == seen, "in this order, whichever were seen"
    assert {("running", "ACTIVE")} <= set(seen)
    delete(cloud, "steps")


def test_a_stock_out_is_waited_for_with_its_reason(cloud: EmulatedCloud, network: str) -> None:
    prepare_group(cloud, "scarce", network)
    script(cloud, {"kind": "stockout", "times": 100_000, "plane": "compute_engine"})
    done = cloud.call_and_wait("POST", f"{GROUPS}/scarce/resize?size=2")
    assert "error" not in done, "the request itself is accepted"

    def reason() -> Any:
        bulk = cloud.call_ok("GET", f"{GROUPS}/scarce")["status"]["bulkInstanceOperation"]
        return bulk["inProgress"] and bulk.get("lastProgressCheck", {}).get("error")

    error = wait_for(reason, "the check of its progress")["errors"][0]
    assert error["code"] == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    assert "zonesAvailable: ''" in error["message"]
    assert statuses(cloud, "scarce") == ["PENDING"] * 2
    cloud.call_ok("DELETE", "emulator/faults")
    wait_for_state(cloud, "scarce", "ACTIVE")
    delete(cloud, "scarce")


def test_a_group_beyond_the_quota_is_pending_without_a_word(cloud: EmulatedCloud, network: str) -> None:
    cloud.call_ok("POST", "emulator/settings", {"quotas": {**LARGE_QUOTAS, "tpus-per-tpu-family-ct6e": 4}})
    prepare_group(cloud, "poor", network)
    cloud.call_and_wait("POST", f"{GROUPS}/poor/resize?size=2")
    wait_for(lambda: statuses(cloud, "poor") == ["PENDING"] * 2, "it waits")
    bulk = cloud.call_ok("GET", f"{GROUPS}/poor")["status"]["bulkInstanceOperation"]
    assert bulk["inProgress"]
    assert "error" not in bulk.get("lastProgressCheck", {})
    delete(cloud, "poor")
    spot = properties(cloud, network, scheduling=SPOT)
    create_group(cloud, "rich", network, vm=spot)  # another pool
    delete(cloud, "rich")


def test_the_pools_of_the_two_planes_are_apart(cloud: EmulatedCloud, network: str) -> None:
    none = {"tpus-per-tpu-family-ct6e": 0, "preemptible-tpu-v6e": 8, "tpu-v6e": 0}
    cloud.call_ok("POST", "emulator/settings", {"quotas": {**LARGE_QUOTAS, **none}})
    body = {**properties(cloud, network, "ct6e-standard-4t"), "name": "lone"}
    body["machineType"] = "zones/us-central1-a/machineTypes/ct6e-standard-4t"
    status, answer = cloud.call("POST", INSTANCES, body)
    assert status == 403
    assert message(answer) == "Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region us-central1."
    done = cloud.call_and_wait("POST", INSTANCES, {**body, "scheduling": FLEX})
    assert "error" not in done
    wait_for(lambda: cloud.call_ok("GET", f"{INSTANCES}/lone")["status"] == "RUNNING", "flex-start draws on the other")
    cloud.call_and_wait("DELETE", f"{INSTANCES}/lone")


def test_a_flex_start_vm_is_pending_until_its_request_is_no_longer_valid(cloud: EmulatedCloud, network: str) -> None:
    script(cloud, {"kind": "stockout", "times": 100_000, "capacity": "flex_start"})
    body = {**properties(cloud, network, "ct6e-standard-4t", scheduling=FLEX), "name": "late"}
    body["machineType"] = "zones/us-central1-a/machineTypes/ct6e-standard-4t"
    assert "error" not in cloud.call_and_wait("POST", INSTANCES, body)
    assert cloud.call_ok("GET", f"{INSTANCES}/late")["status"] == "PENDING"
    cloud.call_and_wait("DELETE", f"{INSTANCES}/late")
    cloud.call_ok("POST", INSTANCES, {**body, "params": {"requestValidForDuration": {"seconds": "0"}}})
    wait_for(lambda: cloud.call("GET", f"{INSTANCES}/late")[0] == 404, "the request has ended")


def test_a_stock_out_of_a_single_vm_is_the_error_of_its_operation(cloud: EmulatedCloud, network: str) -> None:
    script(cloud, {"kind": "stockout", "capacity": "spot", "zone": "us-central1-a"})
    body = {**properties(cloud, network, "ct6e-standard-4t", scheduling=SPOT), "name": "none"}
    body["machineType"] = "zones/us-central1-a/machineTypes/ct6e-standard-4t"
    done = cloud.call_and_wait("POST", INSTANCES, body)
    error = done["error"]["errors"][0]
    assert error["code"] == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    assert "A ct6e-standard-4t VM instance is currently unavailable in the us-central1-a zone." in error["message"]
    assert cloud.call("GET", f"{INSTANCES}/none")[0] == 404
    script(cloud, {"kind": "type_denied", "accelerator_type": "v6e-4", "plane": "compute_engine"})
    status, answer = cloud.call("POST", INSTANCES, body)
    words = "This user agent is not allowed to use the machine type ct6e-standard-4t."
    assert (status, message(answer)) == (400, words)


def test_an_internal_error_after_staging_ends_a_group(cloud: EmulatedCloud, network: str) -> None:
    prepare_group(cloud, "broken", network)
    script(cloud, {"kind": "internal", "plane": "compute_engine"})
    cloud.call_and_wait("POST", f"{GROUPS}/broken/resize?size=2")
    group = wait_for_state(cloud, "broken", "FAILED")
    details = group["status"]["appliedAcceleratorTopologies"][0]["stateDetails"]
    assert details["error"]["errors"][0]["code"] == "INTERNAL_ERROR"
    assert group["status"]["currentInstanceStatuses"] == {"nonExistent": 2}
    codes = [one["lastAttempt"]["errors"]["errors"][0]["code"] for one in managed(cloud, "broken")]
    assert codes == ["INTERNAL_ERROR"] * 2
    delete(cloud, "broken")


@pytest.mark.parametrize("state", ["INCOMPLETE", *deep("FAILED", "ACTIVE_DEGRADED")])
def test_a_slice_that_does_not_become_whole(cloud: EmulatedCloud, network: str, state: str) -> None:
    name = state.lower().replace("_", "-")
    prepare_group(cloud, name, network)
    script(cloud, {"kind": "slice_creation", "state": state, "worker": 1})
    cloud.call_and_wait("POST", f"{GROUPS}/{name}/resize?size=2")
    wait_for_state(cloud, name, state)
    running = {"INCOMPLETE": 1, "FAILED": 0, "ACTIVE_DEGRADED": 2}[state]
    assert sorted(statuses(cloud, name)) == ["RUNNING"] * running + ["TERMINATED"] * (2 - running)
    delete(cloud, name)


def test_a_spot_slice_is_preempted_and_not_repaired(cloud: EmulatedCloud, network: str) -> None:
    asks = {**SPOT, "preemptionNoticeDuration": {"seconds": "120"}}
    create_group(cloud, "taken", network, vm=properties(cloud, network, scheduling=asks))
    name = managed(cloud, "taken")[0]["name"]
    watch = "curl -s -H 'Metadata-Flavor: Google' http://$GCE_METADATA_HOST/computeMetadata/v1/instance/preempted"
    assert asyncio.run(run(cloud, name, watch)) == "FALSE"
    script(cloud, {"kind": "preempted", "after_seconds": 0, "notice_seconds": 600})
    wait_for(lambda: asyncio.run(run(cloud, name, watch)) == "TRUE", "announced while it runs")
    assert topology_state(cloud.call_ok("GET", f"{GROUPS}/taken")) == "ACTIVE"
    script(cloud, {"kind": "preempted", "after_seconds": 0})
    group = wait_for_state(cloud, "taken", "INCOMPLETE")
    wait_for(lambda: statuses(cloud, "taken") == ["TERMINATED"] * 2, "both VMs have stopped")
    assert group["targetSize"] == 2
    listed = cloud.call_ok("GET", f"{ZONAL}/operations")["items"]
    assert [one["operationType"] for one in listed].count("compute.instances.preempted") == 2
    delete(cloud, "taken")


def test_a_slice_is_reactivated_as_a_whole(cloud: EmulatedCloud, network: str) -> None:
    create_group(cloud, "again", network)
    name = managed(cloud, "again")[0]["name"]
    before = asyncio.run(run(cloud, name, "echo kept > file; echo $SLIPWAY_BOOT_ID"))
    script(cloud, {"kind": "slice_state", "state": "REACTIVATING", "seconds": 0.5, "after_seconds": 0})
    wait_for(lambda: cloud.call_ok("GET", "emulator/state")["fault"].popitem()[1]["struck"], "it has begun")
    wait_for_state(cloud, "again", "ACTIVE")
    kept, after = asyncio.run(run(cloud, name, "cat file; echo $SLIPWAY_BOOT_ID")).splitlines()
    assert (kept, after != before.strip()) == ("kept", True)
    delete(cloud, "again")


@pytest.mark.deep
def test_a_vm_ends_with_its_max_run_duration_also_after_a_restart(fresh_cloud: EmulatedCloud) -> None:
    """The shortest that Google takes is 30 seconds."""
    fresh_cloud.create_network("net")
    short = {**SPOT, "maxRunDuration": {"seconds": "30"}, "instanceTerminationAction": "DELETE"}
    create_group(fresh_cloud, "pod", "net", vm=properties(fresh_cloud, "net", scheduling=short))
    name = managed(fresh_cloud, "pod")[0]["name"]
    instance = fresh_cloud.call_ok("GET", f"{INSTANCES}/{name}")
    assert instance["resourceStatus"]["scheduling"]["terminationTimestamp"] > instance["lastStartTimestamp"]
    fresh_cloud.kill()
    fresh_cloud.start()
    wait_for(lambda: fresh_cloud.call("GET", f"{INSTANCES}/{name}")[0] == 404, "Google has deleted it")
    wait_for_state(fresh_cloud, "pod", "INCOMPLETE")
    counts = fresh_cloud.call_ok("GET", f"{GROUPS}/pod")["status"]["currentInstanceStatuses"]
    wait_for(lambda: fresh_cloud.call_ok("GET", f"{GROUPS}/pod")["status"]["currentInstanceStatuses"] == {
        "nonExistent": 2}, f"both are gone, not {counts}")  # fmt: skip


@pytest.mark.deep
def test_a_killed_emulator_goes_on_with_a_slice(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    fresh_cloud.call_ok("POST", "emulator/settings", {"operation_seconds": 0.5})
    prepare_group(fresh_cloud, "pod", "net")
    fresh_cloud.call_ok("POST", f"{GROUPS}/pod/resize?size=2")
    fresh_cloud.kill()
    fresh_cloud.start()
    wait_for_state(fresh_cloud, "pod", "ACTIVE")
    name = managed(fresh_cloud, "pod")[0]["name"]
    assert asyncio.run(run(fresh_cloud, name, "echo here")) == "here\n"

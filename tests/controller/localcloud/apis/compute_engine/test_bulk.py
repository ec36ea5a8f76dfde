"""How slices come and go: states on the way, shortages, failures, preemptions, reactivation."""

from typing import Any

import pytest

from tests.conftest import deep
from tests.controller.localcloud.apis.compute_engine.slices import (
    GROUPS,
    SPOT,
    ZONAL,
    ask,
    create_group,
    managed,
    prepare_group,
    properties,
    run,
    topology_state,
    wait_for_state,
)
from tests.controller.localcloud.harness import INSTANCES, LARGE_QUOTAS, EmulatedCloud, wait_for


def resize(cloud: EmulatedCloud, name: str) -> None:
    """Ask for both VMs of a group."""
    done = cloud.call_and_wait("POST", f"{GROUPS}/{name}/resize?size=2")
    assert "error" not in done, "the request itself is accepted"


def statuses(cloud: EmulatedCloud, name: str) -> list[str]:
    return [one.get("instanceStatus", "") for one in managed(cloud, name)]


def test_vms_are_pending_staged_and_running_before_the_topology_is_active(cloud: EmulatedCloud, net: str) -> None:
    prepare_group(cloud, "steps", net)
    seen: list[tuple[str, str]] = []

    def look() -> bool:
        group = cloud.call_ok("GET", f"{GROUPS}/steps")
        counts = group["status"]["currentInstanceStatuses"]
        assert sum(counts.values()) == 2
        state = (next(iter(counts)), topology_state(group))
        if not seen or seen[-1] != state:
            seen.append(state)
        return state[1] == "ACTIVE"

    with cloud.settings(operation_seconds=0.2):
        resize(cloud, "steps")
        wait_for(look, "the topology is ACTIVE")
    order = [("pending", "ACTIVATING"), ("staging", "ACTIVATING"), ("running", "ACTIVATING"), ("running", "ACTIVE")]
    assert [state for state in order if state in seen] == seen, "in this order, whichever were seen"
    cloud.delete(f"{GROUPS}/steps")


def test_a_stock_out_is_waited_for_with_its_reason(cloud: EmulatedCloud, net: str) -> None:
    prepare_group(cloud, "scarce", net)
    cloud.script({"kind": "stockout", "times": 100_000, "plane": "compute_engine"})
    resize(cloud, "scarce")

    def reason() -> Any:
        bulk = cloud.call_ok("GET", f"{GROUPS}/scarce")["status"]["bulkInstanceOperation"]
        return bulk["inProgress"] and bulk.get("lastProgressCheck", {}).get("error")

    error = wait_for(reason, "the check of its progress")["errors"][0]
    assert error["code"] == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    assert "zonesAvailable: ''" in error["message"]
    assert statuses(cloud, "scarce") == ["PENDING"] * 2
    cloud.call_ok("DELETE", "emulator/faults")
    wait_for_state(cloud, "scarce", "ACTIVE")
    cloud.delete(f"{GROUPS}/scarce")


def test_a_group_beyond_the_quota_is_pending_without_a_word(cloud: EmulatedCloud, net: str) -> None:
    with cloud.settings(quotas={**LARGE_QUOTAS, "tpus-per-tpu-family-ct6e": 4}):
        prepare_group(cloud, "poor", net)
        resize(cloud, "poor")
        wait_for(lambda: statuses(cloud, "poor") == ["PENDING"] * 2, "it waits")
        bulk = cloud.call_ok("GET", f"{GROUPS}/poor")["status"]["bulkInstanceOperation"]
        assert bulk["inProgress"]
        assert "error" not in bulk.get("lastProgressCheck", {})
        cloud.delete(f"{GROUPS}/poor")
        create_group(cloud, "rich", net, vm=properties(cloud, net, scheduling=SPOT))  # another pool
        cloud.delete(f"{GROUPS}/rich")


def test_an_internal_error_after_staging_ends_a_group(cloud: EmulatedCloud, net: str) -> None:
    prepare_group(cloud, "broken", net)
    cloud.script({"kind": "internal", "plane": "compute_engine"})
    resize(cloud, "broken")
    group = wait_for_state(cloud, "broken", "FAILED")
    details = group["status"]["appliedAcceleratorTopologies"][0]["stateDetails"]
    assert details["error"]["errors"][0]["code"] == "INTERNAL_ERROR"
    assert group["status"]["currentInstanceStatuses"] == {"nonExistent": 2}
    codes = [one["lastAttempt"]["errors"]["errors"][0]["code"] for one in managed(cloud, "broken")]
    assert codes == ["INTERNAL_ERROR"] * 2
    cloud.delete(f"{GROUPS}/broken")


@pytest.mark.parametrize("state", ["INCOMPLETE", *deep("FAILED", "ACTIVE_DEGRADED")])
def test_a_slice_that_does_not_become_whole(cloud: EmulatedCloud, net: str, state: str) -> None:
    name = state.lower().replace("_", "-")
    prepare_group(cloud, name, net)
    cloud.script({"kind": "slice_creation", "state": state, "worker": 1})
    resize(cloud, name)
    wait_for_state(cloud, name, state)
    running = {"INCOMPLETE": 1, "FAILED": 0, "ACTIVE_DEGRADED": 2}[state]
    assert sorted(statuses(cloud, name)) == ["RUNNING"] * running + ["TERMINATED"] * (2 - running)
    cloud.delete(f"{GROUPS}/{name}")


def test_a_spot_slice_is_preempted_and_not_repaired(cloud: EmulatedCloud, net: str) -> None:
    asks = {**SPOT, "preemptionNoticeDuration": {"seconds": "120"}}
    create_group(cloud, "taken", net, vm=properties(cloud, net, scheduling=asks))
    name = managed(cloud, "taken")[0]["name"]
    assert ask(cloud, name, "preempted") == "FALSE"
    cloud.script({"kind": "preempted", "after_seconds": 0, "notice_seconds": 600})
    wait_for(lambda: ask(cloud, name, "preempted") == "TRUE", "announced while it runs")
    assert topology_state(cloud.call_ok("GET", f"{GROUPS}/taken")) == "ACTIVE"
    cloud.call_ok("DELETE", "emulator/faults")
    cloud.script({"kind": "preempted", "after_seconds": 0})
    group = wait_for_state(cloud, "taken", "INCOMPLETE")
    wait_for(lambda: statuses(cloud, "taken") == ["TERMINATED"] * 2, "both VMs have stopped")
    assert group["targetSize"] == 2
    listed = cloud.listed(f"{ZONAL}/operations", "items")
    assert [one["operationType"] for one in listed].count("compute.instances.preempted") == 2
    cloud.delete(f"{GROUPS}/taken")


def test_a_slice_is_reactivated_as_a_whole(cloud: EmulatedCloud, net: str) -> None:
    create_group(cloud, "again", net)
    name = managed(cloud, "again")[0]["name"]
    before = run(cloud, name, "echo kept > file; echo $SLIPWAY_BOOT_ID")
    cloud.script({"kind": "slice_state", "state": "REACTIVATING", "seconds": 0.5, "after_seconds": 0})
    wait_for(lambda: cloud.call_ok("GET", "emulator/state")["fault"].popitem()[1]["struck"], "it has begun")
    wait_for_state(cloud, "again", "ACTIVE")
    kept, after = run(cloud, name, "cat file; echo $SLIPWAY_BOOT_ID").splitlines()
    assert (kept, after != before.strip()) == ("kept", True)
    cloud.delete(f"{GROUPS}/again")


@pytest.mark.deep
def test_a_vm_ends_with_its_max_run_duration_although_the_emulator_is_killed_meanwhile(
    fresh_cloud: EmulatedCloud,
) -> None:
    """While the slice is made, and once it lives. The shortest duration that Google takes is 30 seconds."""
    fresh_cloud.create_network("net")
    short = {**SPOT, "maxRunDuration": {"seconds": "30"}, "instanceTerminationAction": "DELETE"}
    prepare_group(fresh_cloud, "pod", "net", vm=properties(fresh_cloud, "net", scheduling=short))
    with fresh_cloud.settings(operation_seconds=0.5):
        fresh_cloud.call_ok("POST", f"{GROUPS}/pod/resize?size=2")
        fresh_cloud.kill()
        fresh_cloud.start()
        wait_for_state(fresh_cloud, "pod", "ACTIVE")
    name = managed(fresh_cloud, "pod")[0]["name"]
    assert run(fresh_cloud, name, "echo here") == "here\n"
    instance = fresh_cloud.call_ok("GET", f"{INSTANCES}/{name}")
    assert instance["resourceStatus"]["scheduling"]["terminationTimestamp"] > instance["lastStartTimestamp"]
    fresh_cloud.kill()
    fresh_cloud.start()
    wait_for(lambda: fresh_cloud.call("GET", f"{INSTANCES}/{name}")[0] == 404, "Google has deleted it")
    wait_for_state(fresh_cloud, "pod", "INCOMPLETE")

    def gone() -> bool:
        counts = fresh_cloud.call_ok("GET", f"{GROUPS}/pod")["status"]["currentInstanceStatuses"]
        return counts == {"nonExistent": 2}

    wait_for(gone, "both are gone")

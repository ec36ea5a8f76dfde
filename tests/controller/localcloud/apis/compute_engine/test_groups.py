"""Managed instance groups of TPU VMs: a slice is made all at once, works like a pod, and is deleted as a whole."""

from typing import Any

import pytest

from tests.controller.localcloud.apis.compute_engine.slices import (
    GROUPS,
    POLICIES,
    TEMPLATES,
    ZONAL,
    ask,
    assert_fits,
    create_group,
    group_body,
    managed,
    prepare_group,
    properties,
    run,
    topology_state,
    wait_for_state,
    workload_policy,
)
from tests.controller.localcloud.harness import COMPUTE, INSTANCES, PROJECT, REGION, EmulatedCloud, wait_for


@pytest.fixture(scope="module")
def idle(cloud: EmulatedCloud, net: str) -> str:
    """A group of two VMs that has none yet."""
    prepare_group(cloud, "idle", net)
    return "idle"


def test_a_slice_of_two_vms(cloud: EmulatedCloud, net: str) -> None:
    group = create_group(cloud, "two", net)
    assert_fits("InstanceGroupManager", group)
    root = cloud.endpoint["url"]
    assert group["resourcePolicies"]["workloadPolicy"] == f"{root}{POLICIES}/two"
    assert group["instanceTemplate"] == f"{root}{TEMPLATES}/two"
    assert (group["targetSize"], group["status"]["isStable"]) == (2, True)
    assert group["status"]["currentInstanceStatuses"] == {"running": 2}
    listed = cloud.call_ok("POST", f"{GROUPS}/two/listManagedInstances")
    assert_fits("InstanceGroupManagersListManagedInstancesResponse", listed)
    members = listed["managedInstances"]
    assert [(one["instanceStatus"], one["currentAction"]) for one in members] == [("RUNNING", "NONE")] * 2
    names = [one["name"] for one in members]
    assert [one["instance"] for one in members] == [f"{root}{INSTANCES}/{name}" for name in names]
    instance = cloud.call_ok("GET", f"{INSTANCES}/{names[0]}")
    assert_fits("Instance", instance)
    assert {item["key"] for item in instance["metadata"]["items"]} >= {"created-by", "instance-template", "ssh-keys"}
    order = ask(cloud, names[0], "attributes/worker-network-endpoints").split(",")
    assert sorted(order) == names
    for index, name in enumerate(order):
        facts = ask(cloud, name, "attributes/tpu-env").splitlines()
        expected = {f"TPU_WORKER_ID: '{index}'", "TOPOLOGY: '2x4'", "HOST_BOUNDS: '1,2,1'"}
        assert expected < set(facts)
        assert run(cloud, name, "echo $TPU_WORKER_ID") == f"{index}\n"
    scopes = cloud.call_ok("GET", f"{COMPUTE}/aggregated/instanceGroupManagers")["items"]
    assert "two" in [one["name"] for one in scopes["zones/us-central1-a"]["instanceGroupManagers"]]
    for plural, path in (("instance_template", f"{TEMPLATES}/two"), ("resource_policy", f"{POLICIES}/two")):
        user = f"{PROJECT}/zones/us-central1-a/instanceGroupManagers/two"
        told = cloud.refused("DELETE", path, None, 400, "resourceInUseByAnotherResource")
        assert told.startswith(f"The {plural} resource '{PROJECT}/")
        assert told.endswith(f"is already being used by '{user}'")
    for path in (f"{GROUPS}/two", f"{TEMPLATES}/two", f"{POLICIES}/two"):
        cloud.delete(path)
    cloud.refused("GET", f"{INSTANCES}/{names[0]}", None, 404)


def test_a_part_of_a_slice_is_neither_made_nor_deleted(cloud: EmulatedCloud, net: str) -> None:
    prepare_group(cloud, "parts", net)
    words = "Target size should be 2 for given accelerator topology but was 1."
    assert cloud.refused("POST", f"{GROUPS}/parts/resize?size=1", None, 400).endswith(words)
    cloud.call_and_wait("POST", f"{GROUPS}/parts/resize?size=2")
    group = wait_for_state(cloud, "parts", "ACTIVE")
    first = managed(cloud, "parts")[0]["instance"]
    path = f"{INSTANCES}/{first.rpartition('/')[2]}"
    cloud.refused("DELETE", path, None, 400, "Target size should be 2")
    cloud.refused("POST", f"{path}/stop", None, 400, "Target size should be 2")
    assert topology_state(cloud.call_ok("GET", f"{GROUPS}/parts")) == "ACTIVE"
    assert "error" not in cloud.call_and_wait("POST", f"{GROUPS}/parts/resize?size=0")
    wait_for(lambda: not managed(cloud, "parts"), "its VMs are gone")
    cloud.refused("GET", path, None, 404)
    assert group["id"] == cloud.call_ok("GET", f"{GROUPS}/parts")["id"]
    cloud.delete(f"{GROUPS}/parts")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"targetSizePolicy": {"mode": "INDIVIDUAL"}}, "MIGs with TPU accelerator topology require BULK mode"),
        ({"targetSizePolicy": None}, "MIGs with TPU accelerator topology require BULK mode in target size policy"),
        ({"resourcePolicies": {"workloadPolicy": "idle"}}, "The URL is malformed."),
        ({"instanceTemplate": "idle"}, "The URL is malformed."),
        ({"targetSize": 3}, "Target size should be 2 for given accelerator topology but was 3."),
    ],
)
def test_groups_that_google_refuses(cloud: EmulatedCloud, idle: str, changed: dict[str, Any], words: str) -> None:
    cloud.refused("POST", GROUPS, group_body(cloud, idle, **changed) | {"name": "other"}, 400, words)
    cloud.refused("GET", f"{GROUPS}/other", None, 404)


def test_what_is_absent_exists_already_or_cannot_be(cloud: EmulatedCloud, idle: str) -> None:
    gone = f"projects/slipway-local/regions/{REGION}/instanceTemplates/gone"
    body = group_body(cloud, idle, instanceTemplate=gone) | {"name": "other"}
    assert cloud.refused("POST", GROUPS, body, 404) == f"The resource '{gone}' was not found"
    template = cloud.call_ok("GET", f"{TEMPLATES}/{idle}")
    assert_fits("InstanceTemplate", template)
    assert_fits("ResourcePolicy", cloud.call_ok("GET", f"{POLICIES}/{idle}"))
    again = {"name": idle, "properties": template["properties"]}
    cloud.refused("POST", TEMPLATES, again, 409)
    assert cloud.call("PATCH", f"{TEMPLATES}/{idle}", again)[0] == 404, "a template cannot be changed"
    for topology in ("2x3x5", "two by four"):
        odd = {"name": "odd", **workload_policy(topology)}
        cloud.refused("POST", POLICIES, odd, 400, "The accelerator topology is not supported.")


@pytest.mark.parametrize(
    ("roles", "method", "path", "lacking"),
    [
        ("compute.viewer", "POST", POLICIES, "compute.resourcePolicies.create"),
        ("compute.viewer", "POST", f"{GROUPS}/idle/resize?size=2", "compute.instanceGroupManagers.update"),
        ("compute.viewer", "DELETE", f"{GROUPS}/idle", "compute.instanceGroupManagers.delete"),
        ("compute.networkUser", "GET", f"{INSTANCES}/any/getGuestAttributes", "compute.instances.getGuestAttributes"),
        ("compute.instanceAdmin.v1", "POST", TEMPLATES, "iam.serviceAccountUser"),
    ],
)
def test_who_may_do_what(cloud: EmulatedCloud, idle: str, roles: str, method: str, path: str, lacking: str) -> None:
    body = {"name": "mine", "properties": properties(cloud, "net")} if path == TEMPLATES else None
    with cloud.settings(caller_roles=[f"roles/{roles}"]):
        cloud.refused(method, path, body, 403, lacking)
        assert method == "GET" or cloud.call("GET", f"{GROUPS}/{idle}")[0] == 200


def test_v5e_is_listed_and_refused_when_vms_are_made(cloud: EmulatedCloud, net: str) -> None:
    """The template is accepted; the group waits, and its errors say why."""
    assert cloud.call_ok("GET", f"{ZONAL}/machineTypes/ct5lp-hightpu-4t")["accelerators"]
    prepare_group(cloud, "lite", net, vm=properties(cloud, net, "ct5lp-hightpu-4t"))
    cloud.call_and_wait("POST", f"{GROUPS}/lite/resize?size=2")
    errors = cloud.call_ok("GET", f"{GROUPS}/lite/listErrors")
    assert_fits("InstanceGroupManagersListErrorsResponse", errors)
    words = "This user agent is not allowed to use the machine type ct5lp-hightpu-4t."
    assert {one["error"]["message"] for one in errors["items"]} == {words}
    assert [one["lastAttempt"]["errors"]["errors"][0]["message"] for one in managed(cloud, "lite")] == [words] * 2
    cloud.delete(f"{GROUPS}/lite")

"""Managed instance groups of TPU VMs: a slice is made all at once, works like a pod, and is deleted as a whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.controller.localcloud.apis.compute_engine.slices import (
    GROUPS,
    INSTANCES,
    POLICIES,
    TEMPLATES,
    ZONAL,
    assert_fits,
    create_group,
    group_body,
    managed,
    message,
    prepare_group,
    properties,
    run,
    topology_state,
    wait_for_state,
    workload_policy,
)
from tests.controller.localcloud.harness import COMPUTE, PROJECT, REGION, EmulatedCloud, wait_for


@pytest.fixture(scope="module")
def network(cloud: EmulatedCloud) -> str:
    cloud.create_network("net")
    return "net"


@pytest.fixture(scope="module")
def idle(cloud: EmulatedCloud, network: str) -> str:
    """A group of two VMs that has none yet."""
    prepare_group(cloud, "idle", network)
    return "idle"


def test_a_slice_of_two_vms(cloud: EmulatedCloud, network: str) -> None:
    group = create_group(cloud, "two", network)
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
    ask = "curl -s -H 'Metadata-Flavor: Google' http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes"
    order = asyncio.run(run(cloud, names[0], f"{ask}/worker-network-endpoints")).split(",")
    assert sorted(order) == names
    for index, name in enumerate(order):
        facts = asyncio.run(run(cloud, name, f"{ask}/tpu-env")).splitlines()
        expected = {f"TPU_WORKER_ID: '{index}'", "TOPOLOGY: '2x4'", "HOST_BOUNDS: '1,2,1'"}
        assert expected < set(facts)
        assert asyncio.run(run(cloud, name, "echo $TPU_WORKER_ID")) == f"{index}\n"
    scopes = cloud.call_ok("GET", f"{COMPUTE}/aggregated/instanceGroupManagers")["items"]
    assert "two" in [one["name"] for one in scopes["zones/us-central1-a"]["instanceGroupManagers"]]
    for plural, path in (("instance_template", f"{TEMPLATES}/two"), ("resource_policy", f"{POLICIES}/two")):
        status, answer = cloud.call("DELETE", path)
        assert status == 400
        assert answer["error"]["errors"][0]["reason"] == "resourceInUseByAnotherResource"
        user = f"{PROJECT}/zones/us-central1-a/instanceGroupManagers/two"
        assert message(answer).startswith(f"The {plural} resource '{PROJECT}/")
        assert message(answer).endswith(f"is already being used by '{user}'")
    cloud.call_and_wait("DELETE", f"{GROUPS}/two")
    cloud.call_and_wait("DELETE", f"{TEMPLATES}/two")
    cloud.call_and_wait("DELETE", f"{POLICIES}/two")
    assert cloud.call("GET", f"{INSTANCES}/{names[0]}")[0] == 404
    assert cloud.call("GET", f"{GROUPS}/two")[0] == 404


def test_a_part_of_a_slice_is_neither_made_nor_deleted(cloud: EmulatedCloud, network: str) -> None:
    prepare_group(cloud, "parts", network)
    status, answer = cloud.call("POST", f"{GROUPS}/parts/resize?size=1")
    assert status == 400
    assert message(answer).endswith("Target size should be 2 for given accelerator topology but was 1.")
    cloud.call_and_wait("POST", f"{GROUPS}/parts/resize?size=2")
    group = wait_for_state(cloud, "parts", "ACTIVE")
    first = managed(cloud, "parts")[0]["instance"]
    name = first.rpartition("/")[2]
    for method, path, body in (
        ("DELETE", f"{INSTANCES}/{name}", None),
        ("POST", f"{INSTANCES}/{name}/stop", None),
        ("POST", f"{GROUPS}/parts/deleteInstances", {"instances": [first]}),
    ):
        status, answer = cloud.call(method, path, body)
        assert (status, "Target size should be 2" in message(answer)) == (400, True), path
    assert topology_state(cloud.call_ok("GET", f"{GROUPS}/parts")) == "ACTIVE"
    done = cloud.call_and_wait("POST", f"{GROUPS}/parts/resize?size=0")
    assert "error" not in done
    wait_for(lambda: not managed(cloud, "parts"), "its VMs are gone")
    assert cloud.call("GET", f"{INSTANCES}/{name}")[0] == 404
    assert group["id"] == cloud.call_ok("GET", f"{GROUPS}/parts")["id"]
    cloud.call_and_wait("DELETE", f"{GROUPS}/parts")


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
    status, answer = cloud.call("POST", GROUPS, group_body(cloud, idle, **changed) | {"name": "other"})
    assert (status, words in message(answer)) == (400, True), answer
    assert cloud.call("GET", f"{GROUPS}/other")[0] == 404


def test_what_is_absent_or_exists_already(cloud: EmulatedCloud, idle: str) -> None:
    gone = f"projects/slipway-local/regions/{REGION}/instanceTemplates/gone"
    body = group_body(cloud, idle, instanceTemplate=gone)
    status, answer = cloud.call("POST", GROUPS, body | {"name": "other"})
    assert (status, message(answer)) == (404, f"The resource '{gone}' was not found")
    template = cloud.call_ok("GET", f"{TEMPLATES}/{idle}")
    assert_fits("InstanceTemplate", template)
    assert_fits("ResourcePolicy", cloud.call_ok("GET", f"{POLICIES}/{idle}"))
    again = {"name": idle, "properties": template["properties"]}
    assert cloud.call("POST", TEMPLATES, again)[0] == 409
    assert cloud.call("PATCH", f"{TEMPLATES}/{idle}", again)[0] == 404, "a template cannot be changed"


def test_a_resize_request_is_refused(cloud: EmulatedCloud, idle: str) -> None:
    status, answer = cloud.call("POST", f"{GROUPS}/{idle}/resizeRequests", {"name": "more", "resizeBy": 2})
    words = "Creating resize requests for managed instance group with TPU is not allowed"
    assert (status, message(answer)) == (400, words)


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
    cloud.call_ok("POST", "emulator/settings", {"caller_roles": [f"roles/{roles}"]})
    try:
        body = {"name": "mine", "properties": properties(cloud, "net")} if path == TEMPLATES else None
        status, answer = cloud.call(method, path, body)
        assert (status, lacking in message(answer)) == (403, True), answer
        assert method == "GET" or cloud.call("GET", f"{GROUPS}/{idle}")[0] == 200
    finally:
        cloud.call_ok("POST", "emulator/settings", {"caller_roles": ["roles/owner"]})


@pytest.mark.parametrize(
    ("topology", "words"), [("2x3x5", "The accelerator topology is not supported."), ("two by four", "not supported")]
)
def test_topologies_that_do_not_exist(cloud: EmulatedCloud, topology: str, words: str) -> None:
    status, answer = cloud.call("POST", POLICIES, {"name": "odd", **workload_policy(topology)})
    assert (status, words in message(answer)) == (400, True), answer


def test_v5e_is_listed_and_refused_when_vms_are_made(cloud: EmulatedCloud, network: str) -> None:
    """The template is accepted; the group waits, and its errors say why."""
    assert cloud.call_ok("GET", f"{ZONAL}/machineTypes/ct5lp-hightpu-4t")["accelerators"]
    prepare_group(cloud, "lite", network, vm=properties(cloud, network, "ct5lp-hightpu-4t"))
    cloud.call_and_wait("POST", f"{GROUPS}/lite/resize?size=2")
    errors = cloud.call_ok("GET", f"{GROUPS}/lite/listErrors")
    assert_fits("InstanceGroupManagersListErrorsResponse", errors)
    words = "This user agent is not allowed to use the machine type ct5lp-hightpu-4t."
    assert {one["error"]["message"] for one in errors["items"]} == {words}
    assert [one["lastAttempt"]["errors"]["errors"][0]["message"] for one in managed(cloud, "lite")] == [words] * 2
    cloud.call_and_wait("DELETE", f"{GROUPS}/lite")

"""Single TPU instances: made, reached over SSH, stopped and started, told of preemptions, refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.controller.localcloud.apis.compute_engine.slices import (
    INSTANCES,
    ZONAL,
    message,
    properties,
    run,
    script,
)
from tests.controller.localcloud.harness import EmulatedCloud, wait_for


@pytest.fixture(scope="module")
def network(cloud: EmulatedCloud) -> str:
    cloud.create_network("net")
    return "net"


def body(cloud: EmulatedCloud, name: str, machine: str = "ct6e-standard-8t", **more: Any) -> dict[str, Any]:
    vm = properties(cloud, "net", machine, **more)
    return {**vm, "name": name, "machineType": f"zones/us-central1-a/machineTypes/{machine}"}


def test_an_instance_lives_stops_starts_and_is_deleted(cloud: EmulatedCloud, network: str) -> None:
    done = cloud.call_and_wait("POST", INSTANCES, body(cloud, "one"))
    assert "error" not in done, done
    instance = cloud.call_ok("GET", f"{INSTANCES}/one")
    root = cloud.endpoint["url"]
    assert instance["status"] == "RUNNING"
    assert instance["machineType"] == f"{root}{ZONAL}/machineTypes/ct6e-standard-8t"
    assert instance["networkInterfaces"][0]["network"].startswith(f"{root}compute/v1/projects/")
    assert asyncio.run(run(cloud, "one", "ls $SLIPWAY_DEV/vfio; echo kept > file")).split() == [*"01234567", "vfio"]
    ask = "curl -s -H 'Metadata-Flavor: Google' http://$GCE_METADATA_HOST/computeMetadata/v1/instance"
    assert asyncio.run(run(cloud, "one", f"{ask}/attributes/worker-network-endpoints")) == "one"
    assert asyncio.run(run(cloud, "one", f"{ask}/preempted")) == "FALSE"
    cloud.call_and_wait("POST", f"{INSTANCES}/one/stop")
    assert cloud.call_ok("GET", f"{INSTANCES}/one")["status"] == "TERMINATED"
    script(cloud, {"kind": "stockout", "plane": "compute_engine"})
    error = cloud.call_and_wait("POST", f"{INSTANCES}/one/start")["error"]["errors"][0]
    assert error["code"] == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    assert cloud.call_ok("GET", f"{INSTANCES}/one")["status"] == "TERMINATED", "it can be started later"
    cloud.call_and_wait("POST", f"{INSTANCES}/one/start")
    assert asyncio.run(run(cloud, "one", "cat file")) == "kept\n"
    cloud.call_and_wait("DELETE", f"{INSTANCES}/one")
    assert cloud.call("GET", f"{INSTANCES}/one")[0] == 404
    assert not cloud.call_ok("GET", "emulator/state").get("slice")


def test_metadata_is_changed_under_its_fingerprint(cloud: EmulatedCloud, network: str) -> None:
    cloud.call_and_wait("POST", INSTANCES, body(cloud, "told", "ct6e-standard-1t"))
    metadata = cloud.call_ok("GET", f"{INSTANCES}/told")["metadata"]
    added = {"items": [*metadata["items"], {"key": "colour", "value": "red"}], "fingerprint": metadata["fingerprint"]}
    cloud.call_and_wait("POST", f"{INSTANCES}/told/setMetadata", added)
    ask = "curl -s -H 'Metadata-Flavor: Google' http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes"
    assert asyncio.run(run(cloud, "told", f"{ask}/colour")) == "red"
    status, answer = cloud.call("POST", f"{INSTANCES}/told/setMetadata", added)
    assert (status, answer["error"]["errors"][0]["reason"]) == (412, "conditionNotMet")
    cloud.call_and_wait("DELETE", f"{INSTANCES}/told")


def test_without_guest_attributes_enabled_no_host_key_appears(cloud: EmulatedCloud, network: str) -> None:
    items = [{"key": "ssh-keys", "value": f"me:{cloud.public_key} me"}]
    cloud.call_and_wait("POST", INSTANCES, body(cloud, "silent", "ct6e-standard-1t", metadata={"items": items}))
    path = f"{INSTANCES}/silent/getGuestAttributes?queryPath=hostkeys/"
    status, answer = cloud.call("GET", path)
    assert (status, message(answer)) == (404, "The resource 'hostkeys/' of type 'Guest Attribute' was not found.")
    items.append({"key": "enable-guest-attributes", "value": "TRUE"})
    cloud.call_and_wait("POST", f"{INSTANCES}/silent/setMetadata", {"items": items})
    wait_for(lambda: cloud.call("GET", path)[0] == 200, "the host key is published")
    cloud.call_and_wait("DELETE", f"{INSTANCES}/silent")


@pytest.mark.parametrize(("model", "verb"), [("SPOT", "preempted"), ("STANDARD", "simulateMaintenanceEvent")])
def test_simulated_maintenance_preempts_a_spot_vm_and_restarts_another(
    cloud: EmulatedCloud, network: str, model: str, verb: str
) -> None:
    scheduling = {"provisioningModel": model, "onHostMaintenance": "TERMINATE"}
    cloud.call_and_wait("POST", INSTANCES, body(cloud, "moved", "ct6e-standard-1t", scheduling=scheduling))
    cloud.call_and_wait("POST", f"{INSTANCES}/moved/simulateMaintenanceEvent")
    wanted = "TERMINATED" if model == "SPOT" else "RUNNING"
    wait_for(lambda: cloud.call_ok("GET", f"{INSTANCES}/moved")["status"] == wanted, wanted)
    operations = cloud.call_ok("GET", f"{ZONAL}/operations")["items"]
    assert f"compute.instances.{verb}" in {operation["operationType"] for operation in operations}
    cloud.call_and_wait("DELETE", f"{INSTANCES}/moved")


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
def test_what_google_refuses(
    cloud: EmulatedCloud, network: str, machine: str, changed: dict[str, Any], words: str
) -> None:
    status, answer = cloud.call("POST", INSTANCES, body(cloud, "refused", machine, **changed))
    assert status == 400
    assert words in message(answer)
    assert cloud.call("GET", f"{INSTANCES}/refused")[0] == 404
    assert not cloud.call_ok("GET", "emulator/state").get("slice")

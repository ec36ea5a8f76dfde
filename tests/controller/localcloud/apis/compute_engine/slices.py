"""Requests by which a slice of several VMs is made on Compute Engine, and what the tests of it share."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import asyncssh

from controller.localcloud.http.discovery import Method, Validation, load_discovery
from tests.controller.localcloud.harness import COMPUTE, INSTANCES, PROJECT, REGION, ZONE, EmulatedCloud, wait_for

REGIONAL, ZONAL = f"{COMPUTE}/regions/{REGION}", f"{COMPUTE}/zones/{ZONE}"
GROUPS = f"{ZONAL}/instanceGroupManagers"
POLICIES, TEMPLATES = f"{REGIONAL}/resourcePolicies", f"{REGIONAL}/instanceTemplates"
IMAGE = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"

SPOT = {"provisioningModel": "SPOT", "onHostMaintenance": "TERMINATE", "instanceTerminationAction": "STOP"}
FLEX = {
    "provisioningModel": "FLEX_START",
    "onHostMaintenance": "TERMINATE",
    "instanceTerminationAction": "DELETE",
    "maxRunDuration": {"seconds": "3600"},
}


def lone(cloud: EmulatedCloud, name: str, machine: str = "ct6e-standard-4t", **more: Any) -> dict[str, Any]:
    """The body of a single instance."""
    return {**properties(cloud, "net", machine, **more), "name": name,
            "machineType": f"zones/us-central1-a/machineTypes/{machine}"}  # fmt: skip


def workload_policy(topology: str = "2x4", **more: Any) -> dict[str, Any]:
    policy = {"type": "HIGH_THROUGHPUT", "acceleratorTopology": topology, "acceleratorTopologyMode": "AUTO_CONNECT"}
    return {"workloadPolicy": policy | more}


def properties(cloud: EmulatedCloud, network: str, machine: str = "ct6e-standard-4t", **more: Any) -> dict[str, Any]:
    """Properties of a VM that admits user `me` with the cloud's key and publishes its host keys."""
    link = f"{PROJECT}/global/networks/{network}"
    metadata = {"ssh-keys": f"me:{cloud.public_key} me", "enable-guest-attributes": "TRUE"}
    return {
        "machineType": machine,
        "scheduling": {"provisioningModel": "STANDARD", "onHostMaintenance": "TERMINATE"},
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"sourceImage": IMAGE, "diskSizeGb": "200"}}],
        "networkInterfaces": [
            {
                "network": link,
                "subnetwork": f"{PROJECT}/regions/{REGION}/subnetworks/{network}",
                "accessConfigs": [{"name": "External NAT", "type": "ONE_TO_ONE_NAT"}],
            }
        ],
        "serviceAccounts": [{"email": "default", "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}],
        "metadata": {"items": [{"key": key, "value": value} for key, value in metadata.items()]},
        "labels": {"purpose": "tests"},
        **more,
    }


def group_body(cloud: EmulatedCloud, name: str, **more: Any) -> dict[str, Any]:
    root = f"{cloud.endpoint['url']}{COMPUTE}/regions/{REGION}"
    return {
        "name": name,
        "baseInstanceName": name,
        "instanceTemplate": f"{root}/instanceTemplates/{name}",
        "targetSize": 0,
        "targetSizePolicy": {"mode": "BULK"},
        "resourcePolicies": {"workloadPolicy": f"{root}/resourcePolicies/{name}"},
        "instanceLifecyclePolicy": {"defaultActionOnFailure": "DO_NOTHING"},
        **more,
    }


def prepare_group(
    cloud: EmulatedCloud, name: str, network: str, topology: str = "2x4", vm: Mapping[str, Any] | None = None
) -> None:
    """A group without VMs, with a policy and a template of its name."""
    cloud.call_and_wait("POST", POLICIES, {"name": name, **workload_policy(topology)})
    vm = vm or properties(cloud, network)
    cloud.call_and_wait("POST", TEMPLATES, {"name": name, "properties": dict(vm)})
    done = cloud.call_and_wait("POST", GROUPS, group_body(cloud, name))
    assert "error" not in done, done


def create_group(
    cloud: EmulatedCloud, name: str, network: str, topology: str = "2x4", vm: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """An ACTIVE slice."""
    prepare_group(cloud, name, network, topology, vm)
    chips = math.prod(map(int, topology.split("x")))
    cloud.call_and_wait("POST", f"{GROUPS}/{name}/resize?size={chips // 4}")
    return wait_for_state(cloud, name, "ACTIVE")


def topology_state(group: Mapping[str, Any]) -> str:
    found = group["status"].get("appliedAcceleratorTopologies", [])
    return found[0]["state"] if found else ""


def wait_for_state(cloud: EmulatedCloud, name: str, *states: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        group = cloud.call_ok("GET", f"{GROUPS}/{name}")
        return group if topology_state(group) in states else None

    return wait_for(look, f"{name} is {' or '.join(states)}")


def managed(cloud: EmulatedCloud, name: str) -> list[dict[str, Any]]:
    return cloud.call_ok("POST", f"{GROUPS}/{name}/listManagedInstances").get("managedInstances", [])


def host_key(cloud: EmulatedCloud, instance: str) -> asyncssh.SSHKey:
    """The host key that an instance has published."""
    path = f"{INSTANCES}/{instance}/getGuestAttributes?queryPath=hostkeys/"

    def look() -> Any:
        status, answer = cloud.call("GET", path)
        assert status in (200, 404), answer
        return answer["queryValue"]["items"][0] if status == 200 else None

    item = wait_for(look, "the host key is published")
    return asyncssh.import_public_key(f"{item['key']} {item['value']}")


def run(cloud: EmulatedCloud, instance: str, command: str) -> str:
    """Run a command on an instance, once it has published its host key; return what it prints."""
    key = host_key(cloud, instance)
    address = cloud.call_ok("GET", f"{INSTANCES}/{instance}")["networkInterfaces"][0]["accessConfigs"][0]["natIP"]
    config = [str(cloud.state / "ssh_config")]

    async def once() -> str:
        known: Any = ([key], [], [])
        async with asyncssh.connect(
            address, username="me", client_keys=[cloud.ssh_key], known_hosts=known, config=config
        ) as connection:
            return str((await connection.run(command, check=True)).stdout)

    return asyncio.run(once())


def ask(cloud: EmulatedCloud, instance: str, key: str) -> str:
    """Return what an instance's metadata server says of it."""
    root = "http://$GCE_METADATA_HOST/computeMetadata/v1/instance"
    return run(cloud, instance, f"curl -s -H 'Metadata-Flavor: Google' {root}/{key}")


def assert_fits(schema: str, answer: Mapping[str, Any]) -> None:
    """Fail unless an answer is what the discovery document declares."""
    Validation(load_discovery()).check_body(
        Method("compute.v1", schema, "POST", body=schema, answer=None, parameters={}), dict(answer)
    )

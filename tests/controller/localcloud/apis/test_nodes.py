"""tpu v2: nodes, the catalog, disks; and the faults that strike them."""

import asyncio
from typing import Any

import asyncssh
import pytest

from controller.resources.pod.refusals import classify
from tests.controller.localcloud.harness import (
    LOCATION,
    NODES,
    PROJECT,
    QUEUED,
    RUNTIME,
    ZONE,
    EmulatedCloud,
    is_alive,
    wait_for,
)

DISKS = f"compute/v1/{PROJECT}/zones/{ZONE}/disks"
SPOT = {"schedulingConfig": {"spot": True}}
CHECKPOINT = "upload/storage/v1/b/bucket/o?uploadType=media&name=run%2Fcheckpoints%2F"


def test_a_node_lives_and_dies(cloud: EmulatedCloud, net: str) -> None:
    operation = cloud.call_ok("POST", f"{NODES}?nodeId=life", cloud.node_body(net, "v5litepod-16"))
    assert cloud.node_state("life") in ("CREATING", "READY")
    done = cloud.wait_operation(operation)
    assert done["metadata"]["target"] == f"{PROJECT}/locations/{ZONE}/nodes/life"
    assert done["response"]["state"] == "READY"
    node = cloud.call_ok("GET", f"{NODES}/life")
    assert node["acceleratorConfig"] == {"type": "V5LITE_POD", "topology": "4x4"}
    assert node["networkConfig"]["network"] == "projects/314159265358/global/networks/net"
    assert not {"multisliceNode", "queuedResource"} & node.keys()  # proto3 JSON leaves out what is false or empty
    assert "enableExternalIps" not in node["networkConfig"]
    addresses = [endpoint["ipAddress"] for endpoint in node["networkEndpoints"]]
    assert len(set(addresses)) == 4
    assert all(address.startswith("127.") for address in addresses)
    assert "accessConfig" not in node["networkEndpoints"][0]
    assert cloud.call_ok("GET", NODES)["nodes"] == cloud.call_ok("GET", f"tpu/v2/{PROJECT}/locations/-/nodes")["nodes"]
    cloud.refused("POST", f"{NODES}?nodeId=life", cloud.node_body(net), 409)
    cloud.refused("POST", f"{NODES}/life:stop", {}, 400, "FAILED_PRECONDITION")  # it has several VMs
    cloud.delete(f"{NODES}/life")
    assert not (cloud.state / "nodes" / node["id"]).exists()


def test_external_addresses_are_given_on_request_also_to_too_many_vms(cloud: EmulatedCloud, net: str) -> None:
    cloud.script({"kind": "endpoints", "endpoints": 2})
    outside = {"networkConfig": {"network": net, "subnetwork": net, "enableExternalIps": True}}
    endpoints = cloud.create_node("outside", net, **outside)["networkEndpoints"]
    assert [bool(one["accessConfig"]["externalIp"]) for one in endpoints] == [True, True]


def test_deleting_a_node_that_is_being_made(cloud: EmulatedCloud, net: str) -> None:
    with cloud.settings(operation_seconds=5):
        creating = cloud.call_ok("POST", f"{NODES}?nodeId=early", cloud.node_body(net))
    cloud.delete(f"{NODES}/early")
    assert cloud.wait_operation(creating)["error"]["code"] == 1  # CANCELLED


def test_no_node_is_made_before_the_service_agent_is_seen(cloud: EmulatedCloud, net: str) -> None:
    """It is made with the API, which itself is refused now and then at that time."""
    usage = f"serviceusage/v1/{PROJECT}/services/tpu.googleapis.com"
    spec = {"parent": LOCATION.removeprefix("tpu/v2/"), "nodeId": "agent", "node": cloud.node_body(net)}
    asked = {f"{NODES}?nodeId=agent": spec["node"], f"{QUEUED}?queuedResourceId=agent": {"tpu": {"nodeSpec": [spec]}}}
    cloud.call_ok("POST", f"{usage}:disable", {})
    with cloud.settings(operation_seconds=3600):
        cloud.call_ok("POST", f"{usage}:enable", {})
    for path, body in asked.items():
        said = [cloud.call("POST", path, body)[1]["error"] for _ in range(2)]
        assert [error["code"] for error in said] == [403, 403]
        assert len([error for error in said if "has the 'TPU Service Agent' role" in error["message"]]) == 1
        assert {classify(error["status"], error["message"]) for error in said} == {"propagating", "permission"}
    cloud.call_ok("POST", f"{usage}:disable", {})
    with cloud.settings(realism="relaxed"):
        cloud.call_ok("POST", f"{usage}:enable", {})
    cloud.create_node("agent", net)
    cloud.delete(f"{NODES}/agent")


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"acceleratorType": "v5litepod-17"}, 400, 'Accelerator type "v5litepod-17" was not found in us-central1-a'),
        ({"acceleratorType": "v4-8"}, 400, "was not found in us-central1-a"),
        ({"runtimeVersion": "tpu-vm-linux"}, 400, 'Runtime version "tpu-vm-linux" unknown'),
        ({"networkConfig": {"network": "none"}}, 404, "global/networks/none"),
        ({"networkConfig": {"network": "net"}}, 400, "A subnetwork must be specified"),
        ({"networkConfig": {"network": "net", "subnetwork": "none"}}, 404, "subnetworks/none"),
        ({"serviceAccount": {"email": "x@slipway-local.iam.gserviceaccount.com"}}, 400, "does not exist"),
        ({"spot": True}, 400, 'Unknown name "spot"'),
    ],
)
def test_wrong_nodes_are_refused(
    cloud: EmulatedCloud, net: str, change: dict[str, Any], status: int, words: str
) -> None:
    cloud.refused("POST", f"{NODES}?nodeId=wrong", cloud.node_body(net) | change, status, words)
    assert cloud.node_state("wrong") is None


def test_zone_and_id_are_checked(cloud: EmulatedCloud, net: str) -> None:
    elsewhere = f"tpu/v2/{PROJECT}/locations/us-moon1-a/nodes?nodeId=n"
    words = "Permission denied on 'locations/us-moon1-a' (or it may not exist)."
    assert cloud.refused("POST", elsewhere, cloud.node_body(net), 403) == words
    cloud.refused("POST", NODES, cloud.node_body(net), 400)


def test_patch_replaces_what_the_mask_names(cloud: EmulatedCloud, net: str) -> None:
    cloud.create_node("patched", net)
    change = {"metadata": {"a": "b"}, "tags": ["ignored"]}
    cloud.call_and_wait("PATCH", f"{NODES}/patched?updateMask=metadata,labels", change)
    node = cloud.call_ok("GET", f"{NODES}/patched")
    assert node["metadata"] == {"a": "b"}
    assert "tags" not in node
    cloud.refused("PATCH", f"{NODES}/patched?updateMask=acceleratorType", {"acceleratorType": "v4-8"}, 400)


def test_stop_and_start(cloud: EmulatedCloud, net: str) -> None:
    node = cloud.create_node("nap", net)
    boot = cloud.run_on_worker(node, "echo $SLIPWAY_BOOT_ID; echo kept > file").stdout
    pid = cloud.start_background(node)
    cloud.call_and_wait("POST", f"{NODES}/nap:stop", {})
    assert cloud.node_state("nap") == "STOPPED"
    assert not is_alive(pid)
    cloud.script({"kind": "stockout"})
    assert cloud.call_and_wait("POST", f"{NODES}/nap:start", {})["error"]["code"] == 8
    assert cloud.node_state("nap") == "STOPPED", "there is no room"
    cloud.call_and_wait("POST", f"{NODES}/nap:start", {})
    again = cloud.run_on_worker(cloud.call_ok("GET", f"{NODES}/nap"), "echo $SLIPWAY_BOOT_ID; cat file").stdout
    assert isinstance(again, str)
    assert again.endswith("\nkept\n")
    assert again != f"{boot}kept\n"


def test_the_catalog(cloud: EmulatedCloud) -> None:
    types = {item["type"] for item in cloud.listed(f"{LOCATION}/acceleratorTypes", "acceleratorTypes")}
    assert "v5litepod-16" in types
    assert "v4-8" not in types
    assert cloud.call_ok("GET", f"{LOCATION}/acceleratorTypes/v5litepod-16")["type"] == "v5litepod-16"
    cloud.refused("GET", f"{LOCATION}/acceleratorTypes/v4-8", None, 404)
    versions = cloud.call_ok("GET", f"{LOCATION}/runtimeVersions")["runtimeVersions"]
    assert {"tpu-ubuntu2204-base", "v2-alpha-tpuv6e"} <= {item["version"] for item in versions}
    assert RUNTIME not in {item["version"] for item in versions}  # Google's list is incomplete: it can be used
    first = cloud.call_ok("GET", f"{LOCATION}/acceleratorTypes?pageSize=500")
    assert len(first["acceleratorTypes"]) < len(types), "fewer than asked for"
    zones = cloud.listed(f"tpu/v2/{PROJECT}/locations", "locations")
    assert ZONE in {zone["locationId"] for zone in zones}


def test_a_refusal_strikes_one_zone_and_tier_once(cloud: EmulatedCloud, net: str) -> None:
    cloud.script({"kind": "stockout", "at": "request", "zone": "us-east1-b"}, {"kind": "quota", "capacity": "spot"})
    cloud.create_node("plain", net)
    words = f"Quota limit 'TPUPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone {ZONE}."
    cheap = cloud.node_body(net) | SPOT
    assert cloud.refused("POST", f"{NODES}?nodeId=cheap", cheap, 429, "RESOURCE_EXHAUSTED") == words
    cloud.create_node("cheap", net, **SPOT)
    cloud.refused("POST", f"{NODES}/cheap:stop", {}, 400, "FAILED_PRECONDITION", "it is spot")
    cloud.script({"kind": "permission"})
    mine = cloud.refused("POST", f"{NODES}?nodeId=mine", cloud.node_body(net), 403, "PERMISSION_DENIED")
    assert mine.startswith("Permission 'tpu.nodes.create' denied")


def test_an_operation_may_fail_late_and_leaves_no_node(cloud: EmulatedCloud, net: str) -> None:
    cloud.script({"kind": "failure", "code": 500, "message": "It broke"}, {"kind": "stockout", "times": 1})
    errors = [cloud.call_and_wait("POST", f"{NODES}?nodeId=late", cloud.node_body(net))["error"] for _ in range(2)]
    assert {"code": 13, "message": "It broke"} in errors
    [scarce] = [error["message"] for error in errors if error["code"] == 8]  # RESOURCE_EXHAUSTED
    assert scarce.startswith('There is no more capacity in the zone "us-central1-a"')
    assert cloud.node_state("late") is None
    assert cloud.create_node("late", net)["state"] == "READY"


def disk(cloud: EmulatedCloud, name: str, kind: str = "pd-balanced") -> dict[str, Any]:
    """The part of a node's body that attaches a new disk."""
    path = f"{PROJECT}/zones/{ZONE}"
    cloud.call_and_wait("POST", DISKS, {"name": name, "sizeGb": "10", "type": f"{path}/diskTypes/{kind}"})
    return {"dataDisks": [{"sourceDisk": f"{path}/disks/{name}", "mode": "READ_WRITE"}]}


def test_a_disk_is_attached_once_and_kept_while_it_is(cloud: EmulatedCloud, net: str) -> None:
    attached = disk(cloud, "data")
    cloud.create_node("first", net, **attached)
    body = cloud.node_body(net) | attached
    cloud.refused("POST", f"{NODES}?nodeId=second", body, 400, "in use by another node")
    cloud.refused("DELETE", f"{DISKS}/data", None, 400, "already being used by")
    cloud.delete(f"{NODES}/first")
    cloud.delete(f"{DISKS}/data")
    cloud.refused("POST", f"{NODES}?nodeId=third", body, 404)


def test_what_a_disk_must_be(cloud: EmulatedCloud, net: str) -> None:
    hyper, plain = disk(cloud, "hyper", "hyperdisk-balanced"), disk(cloud, "plain")
    words = "hyperdisk-balanced cannot be attached to v5e"
    cloud.refused("POST", f"{NODES}?nodeId=n", cloud.node_body(net) | hyper, 400, words)
    several = cloud.node_body(net, "v5litepod-16") | plain
    cloud.refused("POST", f"{NODES}?nodeId=n", several, 400, "READ_ONLY mode only")
    cloud.refused("POST", DISKS, {"name": "small", "sizeGb": "1"}, 400, "Disk size")
    cloud.refused("POST", DISKS, {"name": "odd", "type": "diskTypes/floppy"}, 400, "resource.type")


async def _connect(address: str, config: list[str]) -> None:
    async with asyncssh.connect(address, config=config, known_hosts=None):
        pass


def test_preemption_kills_everything_and_leaves_the_node(fresh_cloud: EmulatedCloud) -> None:
    node = fresh_cloud.create_pod("v5litepod-16")
    pids = [fresh_cloud.start_background(node, worker) for worker in range(4)]
    # One that no longer carries the worker's environment, but has a parent that does.
    text = fresh_cloud.run_on_worker(node, "(env -i sleep 600; true) >/dev/null 2>&1 & sleep 0.2; pgrep -P $!").stdout
    assert isinstance(text, str)
    pids.append(int(text))
    fresh_cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": "bucket"})
    fault = {"kind": "preempted", "after_object": "checkpoints/100/"}
    assert fresh_cloud.call_ok("POST", "emulator/faults", {"key": "run", "faults": [fault]}) == {"registered": True}

    fresh_cloud.send("POST", f"{CHECKPOINT}10%2Fa", b"x")
    assert fresh_cloud.node_state("pod") == "READY"
    fresh_cloud.send("POST", f"{CHECKPOINT}100%2Fa", b"x")

    wait_for(lambda: fresh_cloud.node_state("pod") == "PREEMPTED", "the preemption")
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "no process is left")
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(_connect(node["networkEndpoints"][0]["ipAddress"], [str(fresh_cloud.state / "ssh_config")]))
    fresh_cloud.refused("POST", f"{NODES}/pod:getGuestAttributes", {}, 400)
    assert fresh_cloud.call_ok("POST", "emulator/faults", {"key": "run", "faults": []}) == {"registered": False}

    fresh_cloud.delete(f"{NODES}/pod")
    assert fresh_cloud.create_node("pod", "net", "v5litepod-16")["id"] != node["id"]
    fresh_cloud.send("POST", f"{CHECKPOINT}100%2Fb", b"x")
    assert fresh_cloud.node_state("pod") == "READY", "a fault strikes once"


@pytest.mark.deep
def test_preemption_after_seconds_outlives_a_restart(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.script({"kind": "preempted", "after_seconds": 4})
    pid = fresh_cloud.start_background(fresh_cloud.create_pod())
    fresh_cloud.kill()
    fresh_cloud.start()
    wait_for(lambda: fresh_cloud.node_state("pod") == "PREEMPTED", "the preemption")
    wait_for(lambda: not is_alive(pid), "no process is left")

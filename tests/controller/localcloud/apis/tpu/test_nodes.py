"""tpu v2: nodes, queued resources, the catalog; and the faults that strike them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import asyncssh
import pytest

from controller.localcloud.faults.spec import FAULT_KINDS, parse_fault
from controller.localcloud.http.errors import ApiError
from tests.controller.localcloud.harness import NODES, PROJECT, RUNTIME, ZONE, EmulatedCloud, is_alive, wait_for

LOCATION = NODES.removesuffix("/nodes")
QUEUED = f"{LOCATION}/queuedResources"


@pytest.fixture(scope="module")
def net(cloud: EmulatedCloud) -> str:
    cloud.create_network("net")
    return "net"


@pytest.fixture
def slow_cloud(cloud: EmulatedCloud) -> Iterator[EmulatedCloud]:
    """Make operations take five seconds, until the test ends or sets another time."""
    before = cloud.call_ok("GET", "emulator/settings")["operation_seconds"]
    cloud.call_ok("POST", "emulator/settings", {"operation_seconds": 5})
    yield cloud
    cloud.call_ok("POST", "emulator/settings", {"operation_seconds": before})


def fault(cloud: EmulatedCloud, key: str, **spec: Any) -> None:
    assert cloud.call_ok("POST", "emulator/faults", {"key": key, "faults": [spec]}) == {"registered": True}


def state_of(cloud: EmulatedCloud, name: str) -> str | None:
    status, node = cloud.call("GET", f"{NODES}/{name}")
    return node["state"] if status == 200 else None


def test_a_node_lives_and_dies(cloud: EmulatedCloud, net: str) -> None:
    operation = cloud.call_ok("POST", f"{NODES}?nodeId=life", cloud.node_body(net, "v5litepod-16"))
    assert state_of(cloud, "life") in ("CREATING", "READY")
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
    cloud.call_and_wait("DELETE", f"{NODES}/life")
    status, answer = cloud.call("GET", f"{NODES}/life")
    assert (status, answer["error"]["status"]) == (404, "NOT_FOUND")
    assert not (cloud.state / "nodes" / node["id"]).exists()


def test_external_addresses_are_given_on_request(cloud: EmulatedCloud, net: str) -> None:
    body = cloud.node_body(net)
    body["networkConfig"]["enableExternalIps"] = True
    cloud.call_and_wait("POST", f"{NODES}?nodeId=outside", body)
    (endpoint,) = cloud.call_ok("GET", f"{NODES}/outside")["networkEndpoints"]
    assert endpoint["accessConfig"]["externalIp"]


def test_deleting_a_node_that_is_being_made(slow_cloud: EmulatedCloud, net: str) -> None:
    creating = slow_cloud.call_ok("POST", f"{NODES}?nodeId=early", slow_cloud.node_body(net))
    slow_cloud.call_ok("POST", "emulator/settings", {"operation_seconds": 0.02})
    slow_cloud.call_and_wait("DELETE", f"{NODES}/early")
    assert state_of(slow_cloud, "early") is None
    assert slow_cloud.wait_operation(creating)["error"]["code"] == 1  # CANCELLED


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
    answered, answer = cloud.call("POST", f"{NODES}?nodeId=wrong", cloud.node_body(net) | change)
    assert answered == status
    assert words in answer["error"]["message"]
    assert state_of(cloud, "wrong") is None


def test_zone_id_and_name_are_checked(cloud: EmulatedCloud, net: str) -> None:
    body = cloud.node_body(net)
    status, answer = cloud.call("POST", f"tpu/v2/{PROJECT}/locations/us-moon1-a/nodes?nodeId=n", body)
    assert status == 403
    assert answer["error"]["message"] == "Permission denied on 'locations/us-moon1-a' (or it may not exist)."
    assert cloud.call("POST", NODES, body)[0] == 400
    cloud.call_and_wait("POST", f"{NODES}?nodeId=twice", body)
    assert cloud.call("POST", f"{NODES}?nodeId=twice", body)[0] == 409


def test_patch_replaces_what_the_mask_names(cloud: EmulatedCloud, net: str) -> None:
    cloud.create_node("patched", net)
    cloud.call_and_wait(
        "PATCH", f"{NODES}/patched?updateMask=metadata,labels", {"metadata": {"a": "b"}, "tags": ["ignored"]}
    )
    node = cloud.call_ok("GET", f"{NODES}/patched")
    assert node["metadata"] == {"a": "b"}
    assert "tags" not in node
    assert cloud.call("PATCH", f"{NODES}/patched?updateMask=acceleratorType", {"acceleratorType": "v4-8"})[0] == 400


def test_stop_and_start(cloud: EmulatedCloud, net: str) -> None:
    node = cloud.create_node("nap", net)
    boot = cloud.run_on_worker(node, "echo $SLIPWAY_BOOT_ID; echo kept > file").stdout
    pid = cloud.start_background(node)
    cloud.call_and_wait("POST", f"{NODES}/nap:stop", {})
    assert state_of(cloud, "nap") == "STOPPED"
    assert not is_alive(pid)
    cloud.call_and_wait("POST", f"{NODES}/nap:start", {})
    again = cloud.run_on_worker(cloud.call_ok("GET", f"{NODES}/nap"), "echo $SLIPWAY_BOOT_ID; cat file").stdout
    assert isinstance(again, str)
    assert again.endswith("\nkept\n")
    assert again != f"{boot}kept\n"


def test_a_slice_of_several_vms_cannot_be_stopped(cloud: EmulatedCloud, net: str) -> None:
    cloud.create_node("slice", net, "v5litepod-16")
    status, answer = cloud.call("POST", f"{NODES}/slice:stop", {})
    assert (status, answer["error"]["status"]) == (400, "FAILED_PRECONDITION")


def test_the_catalog(cloud: EmulatedCloud) -> None:
    types = {item["type"] for item in cloud.call_ok("GET", f"{LOCATION}/acceleratorTypes")["acceleratorTypes"]}
    assert "v5litepod-16" in types
    assert "v4-8" not in types
    assert cloud.call_ok("GET", f"{LOCATION}/acceleratorTypes/v5litepod-16")["type"] == "v5litepod-16"
    assert cloud.call("GET", f"{LOCATION}/acceleratorTypes/v4-8")[0] == 404
    versions = cloud.call_ok("GET", f"{LOCATION}/runtimeVersions")["runtimeVersions"]
    assert {"tpu-ubuntu2204-base", "v2-alpha-tpuv6e"} <= {item["version"] for item in versions}
    assert RUNTIME not in {item["version"] for item in versions}  # Google's list is incomplete: it can be used
    zones = cloud.call_ok("GET", f"tpu/v2/{PROJECT}/locations")["locations"]
    assert ZONE in {zone["locationId"] for zone in zones}


def queue(cloud: EmulatedCloud, name: str, net: str, **fields: Any) -> None:
    spec = {"parent": f"{PROJECT}/locations/{ZONE}", "nodeId": f"{name}-node", "node": cloud.node_body(net)}
    cloud.call_ok("POST", f"{QUEUED}?queuedResourceId={name}", {"spot": {}, "tpu": {"nodeSpec": [spec]}, **fields})


def queued_state(cloud: EmulatedCloud, name: str) -> str:
    return cloud.call_ok("GET", f"{QUEUED}/{name}")["state"]["state"]


def test_a_queued_resource_waits_for_capacity(cloud: EmulatedCloud, net: str) -> None:
    fault(cloud, "queue-stockout", kind="stockout", times=2)
    queue(cloud, "patient", net)
    wait_for(lambda: queued_state(cloud, "patient") == "ACTIVE", "capacity")
    node = cloud.call_ok("GET", f"{NODES}/patient-node")
    assert node["state"] == "READY"
    assert node["schedulingConfig"]["spot"] is True
    assert node["queuedResource"].endswith("/queuedResources/patient")
    status, answer = cloud.call("DELETE", f"{QUEUED}/patient")
    assert (status, answer["error"]["status"]) == (400, "FAILED_PRECONDITION")
    cloud.call_and_wait("DELETE", f"{QUEUED}/patient?force=true")
    assert cloud.call("GET", f"{QUEUED}/patient")[0] == 404
    assert state_of(cloud, "patient-node") is None


def test_a_queued_resource_gives_up_when_its_time_is_over(cloud: EmulatedCloud, net: str) -> None:
    fault(cloud, "endless-stockout", kind="stockout", times=1000)
    queue(cloud, "brief", net, queueingPolicy={"validUntilDuration": "0.2s"})
    wait_for(lambda: queued_state(cloud, "brief") == "FAILED", "the end of the wait")
    cloud.call_and_wait("DELETE", f"{QUEUED}/brief")


def test_several_slices_are_named_by_a_prefix(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    spec = {"multisliceParams": {"nodeCount": 2, "nodeIdPrefix": "part"}, "node": fresh_cloud.node_body("net")}
    fresh_cloud.call_ok("POST", f"{QUEUED}?queuedResourceId=multi", {"guaranteed": {}, "tpu": {"nodeSpec": [spec]}})
    wait_for(lambda: queued_state(fresh_cloud, "multi") == "ACTIVE", "both slices")
    names = [node["name"].rpartition("/")[2] for node in fresh_cloud.call_ok("GET", NODES)["nodes"]]
    assert names == ["part-0", "part-1"]


def test_stock_out_fails_the_operation_and_leaves_no_node(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    fault(fresh_cloud, "a", kind="stockout", times=1)
    done = fresh_cloud.call_and_wait("POST", f"{NODES}?nodeId=pod", fresh_cloud.node_body("net"))
    assert done["error"]["code"] == 8  # RESOURCE_EXHAUSTED
    assert done["error"]["message"].startswith('There is no more capacity in the zone "us-central1-a"')
    assert state_of(fresh_cloud, "pod") is None
    assert fresh_cloud.create_node("pod", "net")["state"] == "READY"


async def _connect(address: str, config: list[str]) -> None:
    async with asyncssh.connect(address, config=config, known_hosts=None):
        pass


def test_preemption_kills_everything_and_leaves_the_node(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    node = fresh_cloud.create_node("pod", "net", "v5litepod-16")
    pids = [fresh_cloud.start_background(node, worker) for worker in range(4)]
    # One that no longer carries the worker's environment, but has a parent that does.
    text = fresh_cloud.run_on_worker(node, "(env -i sleep 600; true) >/dev/null 2>&1 & sleep 0.2; pgrep -P $!").stdout
    assert isinstance(text, str)
    pids.append(int(text))
    fresh_cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": "bucket"})
    fault(fresh_cloud, "run", kind="preempted", after_object="checkpoints/100/")

    fresh_cloud.send("POST", "upload/storage/v1/b/bucket/o?uploadType=media&name=run%2Fcheckpoints%2F10%2Fa", b"x")
    assert state_of(fresh_cloud, "pod") == "READY"
    fresh_cloud.send("POST", "upload/storage/v1/b/bucket/o?uploadType=media&name=run%2Fcheckpoints%2F100%2Fa", b"x")

    wait_for(lambda: state_of(fresh_cloud, "pod") == "PREEMPTED", "the preemption")
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "no process is left")
    config = [str(fresh_cloud.state / "ssh_config")]
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(_connect(node["networkEndpoints"][0]["ipAddress"], config))
    assert fresh_cloud.call("POST", f"{NODES}/pod:getGuestAttributes", {})[0] == 400
    assert fresh_cloud.call_ok("POST", "emulator/faults", {"key": "run", "faults": []}) == {"registered": False}

    fresh_cloud.call_and_wait("DELETE", f"{NODES}/pod")
    replaced = fresh_cloud.create_node("pod", "net", "v5litepod-16")
    assert replaced["id"] != node["id"]
    fresh_cloud.send("POST", "upload/storage/v1/b/bucket/o?uploadType=media&name=run%2Fcheckpoints%2F100%2Fb", b"x")
    assert state_of(fresh_cloud, "pod") == "READY", "a fault strikes once"


def test_preemption_after_seconds_outlives_a_restart(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    fault(fresh_cloud, "run", kind="preempted", after_seconds=4)
    node = fresh_cloud.create_node("pod", "net")
    pid = fresh_cloud.start_background(node)
    fresh_cloud.kill()
    fresh_cloud.start()
    wait_for(lambda: state_of(fresh_cloud, "pod") == "PREEMPTED", "the preemption")
    wait_for(lambda: not is_alive(pid), "no process is left")


def test_a_preempted_queued_resource_is_suspended(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    queue(fresh_cloud, "q", "net")
    wait_for(lambda: queued_state(fresh_cloud, "q") == "ACTIVE", "the node")
    fault(fresh_cloud, "now", kind="preempted", after_seconds=0)
    wait_for(lambda: queued_state(fresh_cloud, "q") == "SUSPENDED", "the preemption")
    assert state_of(fresh_cloud, "q-node") == "PREEMPTED"


def test_http_faults_strike_what_they_match(fresh_cloud: EmulatedCloud) -> None:
    fault(fresh_cloud, "a", kind="http", status=503, match="GET .*/nodes$", times=2)
    codes = [fresh_cloud.call("GET", NODES)[0] for _ in range(3)]
    assert codes == [503, 503, 200]
    assert [entry["status"] for entry in fresh_cloud.request_log()[-3:]] == codes


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "preemptd"}, f"known: {', '.join(FAULT_KINDS)}"),
        ({}, f"known: {', '.join(FAULT_KINDS)}"),
        ({"kind": "preempted"}, "exactly one of after_object, after_seconds, after_requests and within_seconds"),
        ({"kind": "frozen", "worker": 1}, "exactly one of after_object, after_seconds"),
        ({"kind": "preempted", "after_object": "a", "after_seconds": 1}, "exactly one of"),
        ({"kind": "brownout", "seconds": 1, "share": 0.5, "after_object": "a", "after_requests": 1}, "at most one of"),
        ({"kind": "brownout", "seconds": 1, "share": 1.5}, "share: Input should be less than or equal to 1"),
        ({"kind": "cut", "match": "x", "at": "end"}, "at: Input should be 'request', 'upload' or 'answer'"),
        ({"kind": "disk_full", "seconds": 1}, "exactly one of"),
        ({"kind": "preempted", "after_second": 1}, "after_second: Extra inputs are not permitted"),
        ({"kind": "stockout", "times": 0}, "times: Input should be greater than or equal to 1"),
        ({"kind": "http", "status": 200, "match": "x"}, "status: Input should be greater"),
        ({"kind": "http", "status": 503, "match": "("}, "match: "),
        ({"kind": "ssh_refused"}, "seconds: Field required"),
    ],
)
def test_a_wrong_fault_is_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=r"cloud\.faults") as refusal:
        parse_fault(spec)
    assert refusal.value.code == 400
    assert words in refusal.value.message


def test_faults_are_registered_all_or_none(cloud: EmulatedCloud) -> None:
    specs = [{"kind": "stockout"}, {"kind": "unknown"}]
    assert cloud.call("POST", "emulator/faults", {"key": "half", "faults": specs})[0] == 400
    assert cloud.call("POST", "emulator/faults", {"key": "", "faults": []})[0] == 400
    assert not any(name.startswith("half") for name in cloud.call_ok("GET", "emulator/state")["fault"])

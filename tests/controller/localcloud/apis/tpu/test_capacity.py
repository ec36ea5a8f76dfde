"""tpu v2 and v2alpha1: tiers, refusals by zone and tier, dead requests, disks, what may be stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.controller.localcloud.harness import NODES, PROJECT, ZONE, EmulatedCloud, wait_for

LOCATION = NODES.removesuffix("/nodes")
QUEUED = f"{LOCATION}/queuedResources"
DISKS = f"compute/v1/{PROJECT}/zones/{ZONE}/disks"


@pytest.fixture(scope="module")
def net(cloud: EmulatedCloud) -> str:
    cloud.create_network("capacity")
    return "capacity"


@pytest.fixture(autouse=True)
def no_faults(cloud: EmulatedCloud) -> Iterator[None]:
    yield
    assert cloud.call_ok("DELETE", "emulator/faults") == {}
    assert cloud.call_ok("GET", "emulator/state")["fault"] == {}


def fault(cloud: EmulatedCloud, **spec: Any) -> None:
    cloud.call_ok("POST", "emulator/faults", {"key": str(spec), "faults": [spec]})


def error(cloud: EmulatedCloud, method: str, path: str, body: Any = None) -> tuple[int, str, str]:
    """Status, canonical code and words of a call that is refused."""
    status, answer = cloud.call(method, path, body)
    return status, answer["error"]["status"], answer["error"]["message"]


def request(cloud: EmulatedCloud, net: str, name: str, **fields: Any) -> dict[str, Any]:
    spec = {"parent": f"{PROJECT}/locations/{ZONE}", "nodeId": name, "node": cloud.node_body(net)}
    return {"tpu": {"nodeSpec": [spec]}, **fields}


def ask(cloud: EmulatedCloud, net: str, name: str, **fields: Any) -> None:
    cloud.call_ok("POST", f"{QUEUED}?queuedResourceId={name}", request(cloud, net, name, **fields))


def state_of(cloud: EmulatedCloud, name: str) -> dict[str, Any]:
    return cloud.call_ok("GET", f"{QUEUED}/{name}")["state"]


def test_a_refusal_strikes_one_zone_and_tier(cloud: EmulatedCloud, net: str) -> None:
    fault(cloud, kind="stockout", at="request", zone="us-east1-b")
    fault(cloud, kind="quota", capacity="spot")
    body = cloud.node_body(net)
    cloud.call_and_wait("POST", f"{NODES}?nodeId=plain", body)
    spot = body | {"schedulingConfig": {"spot": True}}
    status, code, words = error(cloud, "POST", f"{NODES}?nodeId=cheap", spot)
    assert (status, code) == (429, "RESOURCE_EXHAUSTED")
    assert (
        words == f"Quota limit 'TPUPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone {ZONE}."
    )
    cloud.call_and_wait("POST", f"{NODES}?nodeId=cheap", spot)  # once is once
    for name in ("plain", "cheap"):
        cloud.call_and_wait("DELETE", f"{NODES}/{name}")


def test_who_may_not_is_told_at_once(cloud: EmulatedCloud, net: str) -> None:
    fault(cloud, kind="permission")
    status, code, words = error(cloud, "POST", f"{NODES}?nodeId=mine", cloud.node_body(net))
    assert (status, code) == (403, "PERMISSION_DENIED")
    assert words.startswith("Permission 'tpu.nodes.create' denied")


def test_an_operation_may_fail_late(cloud: EmulatedCloud, net: str) -> None:
    fault(cloud, kind="failure", code=500, message="It broke")
    done = cloud.call_and_wait("POST", f"{NODES}?nodeId=late", cloud.node_body(net))
    assert done["error"] == {"code": 13, "message": "It broke"}
    assert cloud.call("GET", f"{NODES}/late")[0] == 404


def test_a_node_may_come_with_another_number_of_vms(cloud: EmulatedCloud, net: str) -> None:
    fault(cloud, kind="endpoints", endpoints=2)
    assert len(cloud.create_node("odd", net)["networkEndpoints"]) == 2
    cloud.call_and_wait("DELETE", f"{NODES}/odd")


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_a_dead_request_stays_until_it_is_deleted(cloud: EmulatedCloud, net: str, state: str) -> None:
    fault(cloud, kind="queued", state=state, message="It was not to be")
    ask(cloud, net, "dead", spot={})
    told = wait_for(lambda: (found := state_of(cloud, "dead"))["state"] == state and found, state)
    assert told.get("failedData") == (
        {"error": {"code": 13, "message": "It was not to be"}} if state == "FAILED" else None
    )
    cloud.call_and_wait("DELETE", f"{QUEUED}/dead")
    assert cloud.call("GET", f"{QUEUED}/dead")[0] == 404


def test_a_request_that_expires_fails_and_says_why(cloud: EmulatedCloud, net: str) -> None:
    fault(cloud, kind="stockout", times=100000)
    ask(cloud, net, "brief", spot={}, queueingPolicy={"validUntilDuration": "0.2s"})
    told = wait_for(lambda: (found := state_of(cloud, "brief"))["state"] == "FAILED" and found, "the end of the wait")
    assert told["failedData"]["error"]["message"] == "The queued resource has expired"
    cloud.call_and_wait("DELETE", f"{QUEUED}/brief")


def test_a_quota_ends_a_request(cloud: EmulatedCloud, net: str) -> None:
    fault(cloud, kind="quota", at="operation")
    ask(cloud, net, "poor", spot={})
    told = wait_for(lambda: (found := state_of(cloud, "poor"))["state"] == "FAILED" and found, "the refusal")
    assert told["failedData"]["error"]["code"] == 8
    cloud.call_and_wait("DELETE", f"{QUEUED}/poor")


def test_flex_start_is_of_the_newer_api_alone(cloud: EmulatedCloud, net: str) -> None:
    body = request(cloud, net, "flex", provisioningModel="FLEX_START")
    newer = QUEUED.replace("/v2/", "/v2alpha1/")
    assert 'Unknown name "provisioningModel"' in error(cloud, "POST", f"{QUEUED}?queuedResourceId=flex", body)[2]
    assert "run_duration must be set" in error(cloud, "POST", f"{newer}?queuedResourceId=flex", body)[2]
    fault(cloud, kind="stockout", capacity="flex_start", at="request")
    body["runDuration"] = {"maxRunDuration": "3600s"}
    assert error(cloud, "POST", f"{newer}?queuedResourceId=flex", body)[0] == 429
    cloud.call_ok("POST", f"{newer}?queuedResourceId=flex", body)
    wait_for(lambda: state_of(cloud, "flex")["state"] == "ACTIVE", "the node")
    cloud.call_and_wait("DELETE", f"{newer}/flex?force=true")


def test_a_request_has_one_tier(cloud: EmulatedCloud, net: str) -> None:
    body = request(cloud, net, "both", spot={}, guaranteed={})
    assert "oneof field 'tier'" in error(cloud, "POST", f"{QUEUED}?queuedResourceId=both", body)[2]


def test_a_spot_node_cannot_be_stopped(cloud: EmulatedCloud, net: str) -> None:
    cloud.call_and_wait("POST", f"{NODES}?nodeId=spot", cloud.node_body(net) | {"schedulingConfig": {"spot": True}})
    status, code, words = error(cloud, "POST", f"{NODES}/spot:stop", {})
    assert (status, code) == (400, "FAILED_PRECONDITION")
    assert "it is spot" in words
    cloud.call_and_wait("DELETE", f"{NODES}/spot")


def test_a_stopped_node_without_room_stays_stopped(cloud: EmulatedCloud, net: str) -> None:
    cloud.create_node("nap", net)
    cloud.call_and_wait("POST", f"{NODES}/nap:stop", {})
    fault(cloud, kind="stockout")
    assert cloud.call_and_wait("POST", f"{NODES}/nap:start", {})["error"]["code"] == 8
    assert cloud.call_ok("GET", f"{NODES}/nap")["state"] == "STOPPED"
    cloud.call_and_wait("POST", f"{NODES}/nap:start", {})
    cloud.call_and_wait("DELETE", f"{NODES}/nap")


def disk(cloud: EmulatedCloud, name: str, kind: str = "pd-balanced") -> dict[str, str]:
    path = f"{PROJECT}/zones/{ZONE}"
    cloud.call_and_wait("POST", DISKS, {"name": name, "sizeGb": "10", "type": f"{path}/diskTypes/{kind}"})
    return {"sourceDisk": f"{path}/disks/{name}", "mode": "READ_WRITE"}


def test_a_disk_is_attached_once_and_kept_while_it_is(cloud: EmulatedCloud, net: str) -> None:
    attached = disk(cloud, "data")
    body = cloud.node_body(net) | {"dataDisks": [attached]}
    cloud.call_and_wait("POST", f"{NODES}?nodeId=first", body)
    assert "in use by another node" in error(cloud, "POST", f"{NODES}?nodeId=second", body)[2]
    assert "already being used by" in error(cloud, "DELETE", f"{DISKS}/data")[2]
    cloud.call_and_wait("DELETE", f"{NODES}/first")
    cloud.call_and_wait("DELETE", f"{DISKS}/data")
    assert error(cloud, "POST", f"{NODES}?nodeId=third", body)[0] == 404


def test_what_a_disk_must_be(cloud: EmulatedCloud, net: str) -> None:
    hyper, plain = disk(cloud, "hyper", "hyperdisk-balanced"), disk(cloud, "plain")
    body = cloud.node_body(net) | {"dataDisks": [hyper]}
    assert "hyperdisk-balanced cannot be attached to v5e" in error(cloud, "POST", f"{NODES}?nodeId=n", body)[2]
    several = cloud.node_body(net, "v5litepod-16") | {"dataDisks": [plain]}
    assert "READ_ONLY mode only" in error(cloud, "POST", f"{NODES}?nodeId=n", several)[2]
    assert "Disk size" in error(cloud, "POST", DISKS, {"name": "small", "sizeGb": "1"})[2]
    assert "resource.type" in error(cloud, "POST", DISKS, {"name": "odd", "type": "diskTypes/floppy"})[2]
    for name in ("hyper", "plain"):
        cloud.call_and_wait("DELETE", f"{DISKS}/{name}")

"""Queued resources over HTTP, and their states one step of the effect after the other, without the passing of time."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from controller.localcloud.apis.quotas import state_document
from controller.localcloud.cloud import Cloud, assemble
from controller.localcloud.http.errors import ApiError
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from tests.controller.localcloud.harness import NODES, PROJECT, QUEUED, REGION, ZONE, EmulatedCloud, wait_for

LOCATION = f"{PROJECT}/locations/{ZONE}"
REQUEST, NODE = f"{LOCATION}/queuedResources/r", f"{LOCATION}/nodes/r"
NEVER = 3600.0
Step = Callable[[], Awaitable[str]]


def body(cloud: EmulatedCloud, name: str, **fields: Any) -> dict[str, Any]:
    spec = {"parent": LOCATION, "nodeId": f"{name}-node", "node": cloud.node_body("net")}
    return {"tpu": {"nodeSpec": [spec]}, **fields}


def ask(cloud: EmulatedCloud, name: str, **fields: Any) -> None:
    cloud.call_ok("POST", f"{QUEUED}?queuedResourceId={name}", body(cloud, name, spot={}, **fields))


def await_state(cloud: EmulatedCloud, name: str, state: str) -> dict[str, Any]:
    def look() -> Any:
        found = cloud.call_ok("GET", f"{QUEUED}/{name}")["state"]
        return found["state"] == state and found

    return wait_for(look, state)


def test_a_queued_resource_waits_for_capacity(cloud: EmulatedCloud, net: str) -> None:
    """It does not leave the queue before: PROVISIONING says that the capacity has been found."""
    cloud.script({"kind": "stockout", "times": 5})
    ask(cloud, "patient")
    states = list[str]()
    while states[-1:] != ["ACTIVE"]:
        states += [cloud.call_ok("GET", f"{QUEUED}/patient")["state"]["state"]]
    assert [state for state, _ in groupby(states)] == ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    node = cloud.call_ok("GET", f"{NODES}/patient-node")
    assert node["state"] == "READY"
    assert node["schedulingConfig"]["spot"] is True
    assert node["queuedResource"].endswith("/queuedResources/patient")
    cloud.refused("DELETE", f"{QUEUED}/patient", None, 400, "FAILED_PRECONDITION")
    cloud.delete(f"{QUEUED}/patient?force=true")
    assert cloud.node_state("patient-node") is None


def test_who_asks_again_and_again_for_a_deletion_does_not_hold_it_up(cloud: EmulatedCloud, net: str) -> None:
    """As a dead man's switch does."""
    ask(cloud, "nagged")
    await_state(cloud, "nagged", "ACTIVE")
    wait_for(lambda: cloud.call("DELETE", f"{QUEUED}/nagged?force=true")[0] == 404, "it is gone")


@pytest.mark.parametrize(
    ("fault", "fields", "state", "code", "words"),
    [
        ({"kind": "queued", "state": "SUSPENDED", "message": "-"}, {}, "SUSPENDED", None, ""),
        ({"kind": "queued", "state": "FAILED", "message": "It was not to be"}, {}, "FAILED", 13, "It was not to be"),
        ({"kind": "quota", "at": "operation"}, {}, "FAILED", 8, ""),
        (
            {"kind": "stockout", "times": 100_000},
            {"queueingPolicy": {"validUntilDuration": "0.2s"}},
            "FAILED",
            None,
            "The queued resource has expired",
        ),
    ],
    ids=["suspended", "failed", "quota", "expired"],
)
def test_a_dead_request_stays_until_it_is_deleted_and_says_why(
    cloud: EmulatedCloud, net: str, fault: dict[str, Any], fields: dict[str, Any], state: str, code: int, words: str
) -> None:
    cloud.script(fault)
    ask(cloud, "dead", **fields)
    told = await_state(cloud, "dead", state)
    assert ("failedData" in told) == (state == "FAILED")
    error = told.get("failedData", {"error": {"message": ""}})["error"]
    assert words in error["message"]
    assert code in (None, error.get("code"))
    cloud.delete(f"{QUEUED}/dead")


def test_tiers(cloud: EmulatedCloud, net: str) -> None:
    """A request has one; flex-start is of the newer API alone."""
    path, newer = (f"{place}?queuedResourceId=flex" for place in (QUEUED, QUEUED.replace("/v2/", "/v2alpha1/")))
    cloud.refused("POST", path, body(cloud, "flex", spot={}, guaranteed={}), 400, "oneof field 'tier'")
    flex = body(cloud, "flex", provisioningModel="FLEX_START")
    cloud.refused("POST", path, flex, 400, 'Unknown name "provisioningModel"')
    cloud.refused("POST", newer, flex, 400, "run_duration must be set")
    cloud.script({"kind": "stockout", "capacity": "flex_start", "at": "request"})
    flex["runDuration"] = {"maxRunDuration": "3600s"}
    cloud.refused("POST", newer, flex, 429)
    cloud.call_ok("POST", newer, flex)
    await_state(cloud, "flex", "ACTIVE")
    cloud.delete(f"{QUEUED}/flex?force=true")


def test_several_slices_are_named_by_a_prefix(cloud: EmulatedCloud, net: str) -> None:
    spec = {"multisliceParams": {"nodeCount": 2, "nodeIdPrefix": "part"}, "node": cloud.node_body(net)}
    cloud.call_ok("POST", f"{QUEUED}?queuedResourceId=multi", {"guaranteed": {}, "tpu": {"nodeSpec": [spec]}})
    await_state(cloud, "multi", "ACTIVE")
    assert [node["name"].rpartition("/")[2] for node in cloud.call_ok("GET", NODES)["nodes"]] == ["part-0", "part-1"]
    cloud.delete(f"{QUEUED}/multi?force=true")


def test_a_preempted_queued_resource_is_suspended(cloud: EmulatedCloud, net: str) -> None:
    ask(cloud, "taken")
    await_state(cloud, "taken", "ACTIVE")
    cloud.script({"kind": "preempted", "after_seconds": 0, "node": "taken-node"})
    await_state(cloud, "taken", "SUSPENDED")
    assert cloud.node_state("taken-node") == "PREEMPTED"


def stepped(tmp_path: Path, play: Callable[[Cloud, Store, Step], Awaitable[None]], **quotas: int) -> None:
    """Run `play` in a cloud whose operations end by themselves only in an hour; `step` ends the next one."""

    async def run() -> None:
        store = Store(tmp_path / "state.db")
        known = Settings(store, operation_seconds=NEVER, quotas=quotas)
        cloud = assemble(store, tmp_path, "http://127.0.0.1:9/", "token", known, asyncio.Event())

        async def step() -> str:
            await cloud.effects()["queued.provision"](REQUEST)
            return store.get("queued", REQUEST)["state"]["state"]  # pyright: ignore[reportOptionalSubscript]

        try:
            await play(cloud, store, step)
        finally:
            await cloud.close()

    asyncio.run(run())


def request_in(store: Store, state: str, initiator: str = "SERVICE") -> None:
    node = {"acceleratorType": "v5litepod-16", "runtimeVersion": "v2-alpha-tpuv5-lite"}
    spec = {"nodeId": "r", "node": node, "parent": LOCATION}
    state_now = state_document(state, initiator)
    store.put("queued", REQUEST, {"name": REQUEST, "tpu": {"nodeSpec": [spec]}, "state": state_now, "createTime": "0"})


def test_a_request_whose_node_the_user_deletes_is_suspended(tmp_path: Path) -> None:
    async def play(cloud: Cloud, store: Store, step: Step) -> None:
        request_in(store, "ACTIVE")
        store.put("node", NODE, {"name": NODE, "id": "7", "state": "READY", "queuedResource": REQUEST})
        store.put("node", f"{NODE}-other", {"name": f"{NODE}-other", "id": "8", "state": "READY"})
        cloud.nodes.suspend_request(REQUEST)
        assert await step() == "ACTIVE", "its node lives"
        store.put("node", NODE, {**store.items("node", NODE)[0][1], "state": "DELETING"})
        cloud.nodes.suspend_request(REQUEST)
        assert await step() == "SUSPENDING", "while the node is being deleted"
        store.delete("node", NODE)
        assert await step() == "SUSPENDED"
        assert store.get("queued", REQUEST)["state"]["stateInitiator"] == "USER"  # pyright: ignore[reportOptionalSubscript]

    stepped(tmp_path, play)


def test_a_request_beyond_the_compute_quota_is_provisioned_suspended_and_fails(tmp_path: Path) -> None:
    async def play(cloud: Cloud, store: Store, step: Step) -> None:
        store.put("compute", f"{PROJECT}/global/networks/default", {"name": "default", "autoCreateSubnetworks": True})
        subnet = {"name": "default", "network": f"{PROJECT}/global/networks/default", "region": REGION}
        store.put("compute", f"{PROJECT}/regions/{REGION}/subnetworks/default", subnet)
        request_in(store, "WAITING_FOR_RESOURCES")
        assert [await step() for _ in range(3)] == ["PROVISIONING", "SUSPENDING", "FAILED"]
        message = store.get("queued", REQUEST)["state"]["failedData"]["error"]["message"]  # pyright: ignore[reportOptionalSubscript]
        assert message.startswith("You have reached INSTANCES limit.")

    stepped(tmp_path, play, INSTANCES=3)


@pytest.mark.parametrize("state", ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE", "SUSPENDING"])
def test_a_request_holds_quota_until_its_resources_are_gone(tmp_path: Path, state: str) -> None:
    """Once, with its node or without."""

    async def play(cloud: Cloud, store: Store, step: Step) -> None:
        kinds = [cloud.nodes.catalog.types["v5litepod-16"]]
        check = partial(cloud.nodes.quotas.check_tpus, ZONE, kinds)
        request_in(store, state)
        node = {"name": NODE, "id": "7", "state": "READY", "acceleratorType": "v5litepod-16", "queuedResource": REQUEST}
        for stored in ([], [node]):
            for one in stored:
                store.put("node", NODE, one)
            with pytest.raises(ApiError, match="TPUV5sLitepodPerProjectPerZoneForTPUAPI"):
                check("on_demand")
            check("spot")
        cloud.nodes.settings.update({"quotas": {"tpu-v5s-litepod": 32}})
        check("on_demand")
        store.delete("node", NODE)
        cloud.nodes.settings.update({"quotas": {"tpu-v5s-litepod": 16}})
        for gone in ("FAILED", "SUSPENDED"):
            request_in(store, gone)
            check("on_demand")

    stepped(tmp_path, play, **{"tpu-v5s-litepod": 31})


def test_a_node_has_one_kind_of_network_config(tmp_path: Path) -> None:
    async def play(cloud: Cloud, store: Store, step: Step) -> None:
        both = {"networkConfig": {"network": "n"}, "networkConfigs": [{"network": "n"}]}
        with pytest.raises(ApiError, match="mutually exclusive"):
            cloud.nodes.add(LOCATION, "r", both)

    stepped(tmp_path, play)

"""The states of a queued resource, one step of its effect after the other, without the passing of time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from controller.localcloud.apis.tpu.requested import state_document
from controller.localcloud.cloud import Cloud, assemble
from controller.localcloud.http.errors import ApiError
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from tests.controller.localcloud.harness import PROJECT, REGION, ZONE

LOCATION = f"{PROJECT}/locations/{ZONE}"
REQUEST, NODE = f"{LOCATION}/queuedResources/r", f"{LOCATION}/nodes/r"
NEVER = 3600.0
Step = Callable[[], Awaitable[str]]


def stepped(tmp_path: Path, play: Callable[[Cloud, Store, Step], Awaitable[None]], **quotas: int) -> None:
    """Run `play` in a cloud whose operations end by themselves only in an hour; `step` ends the next one."""

    async def run() -> None:
        store = Store(tmp_path / "state.db")
        known = Settings(store, operation_seconds=NEVER, quotas=quotas)
        cloud = assemble(store, tmp_path, "http://127.0.0.1:9/", "token", known, asyncio.Event())

        async def step() -> str:
            await cloud.effects["queued.provision"](REQUEST)
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

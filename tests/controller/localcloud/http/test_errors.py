"""A mistake in the emulated cloud itself: told, on record, and nothing is left half done for ever."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from controller.localcloud import cloud as parts
from controller.localcloud.http.call import ApiCall
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from tests.controller.localcloud.harness import RUNTIME, ZONE

ZONED = {"projectsId": "slipway-local", "locationsId": ZONE, "nodesId": "n", "queuedResourcesId": "q"}
NODE = {"acceleratorType": "v5litepod-1", "runtimeVersion": RUNTIME, "networkConfig": {"network": "n"}}
QUEUED = {"tpu": {"nodeSpec": [{"nodeId": "n", "node": NODE}]}}
MISTAKE = "KeyError('ppid')"


class InProcess:
    """An emulated cloud in this process, without its HTTP server, with a network `n`."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "state.db")
        settings = Settings(self.store, operation_seconds=0)
        self.cloud = parts.assemble(self.store, folder, "http://127.0.0.1:65535/", "token", settings, asyncio.Event())

    async def call(self, method: str, body: dict[str, Any] | None = None, **query: str) -> dict[str, Any]:
        """A method of the TPU API; the operation that it began, when that has ended."""
        return await self._call(f"tpu.v2:projects.locations.{method}", ZONED, body or {}, query)

    async def _call(self, key: str, path: dict[str, str], body: dict[str, Any], query: dict[str, str]) -> Any:
        begun: Any = self.cloud.server.handlers[key](ApiCall(mock.Mock(http="POST"), path, query, body, ""))
        while tasks := list(self.cloud.operations._tasks.values()):
            await asyncio.wait(tasks)
        return self.store.get("operation", begun["name"])

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        async def whole() -> None:
            await self.cloud.resume()
            network = {"name": "n", "autoCreateSubnetworks": True}
            await self._call("compute.v1:networks.insert", {"project": "slipway-local"}, network, {})
            await work
            await self.cloud.close()

        asyncio.run(whole())

    def state(self, kind: str) -> list[Any]:
        return [document["state"] for _, document in self.store.items(kind)]

    def mistakes(self) -> list[str]:
        return [found["traceback"] for _, found in self.store.items("mistake")]


@pytest.fixture
def made(tmp_path: Path) -> InProcess:
    return InProcess(tmp_path)


def failing(where: str) -> Any:
    return mock.patch(f"controller.localcloud.vms.workers.{where}", side_effect=KeyError("ppid"))


def in_process(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(made: InProcess, **more: Any) -> None:
        made.run(test(made, **more))

    return run


@in_process
async def test_a_node_whose_deletion_fails_is_as_before_and_can_be_deleted(made: InProcess) -> None:
    await made.call("nodes.create", NODE, nodeId="n")
    with failing("kill_marked"):
        failed = await made.call("nodes.delete")
    assert MISTAKE in failed["error"]["message"]
    assert made.state("node") == ["READY"]
    [traceback] = made.mistakes()
    assert "Traceback" in traceback
    assert "error" not in await made.call("nodes.delete")
    assert made.state("node") == []


@in_process
async def test_a_node_that_cannot_be_made_is_not_there(made: InProcess) -> None:
    with failing("EmulatedWorkers.boot"):
        failed = await made.call("nodes.create", NODE, nodeId="n")
    assert MISTAKE in failed["error"]["message"]
    assert made.state("node") == []
    assert "error" not in await made.call("nodes.create", NODE, nodeId="n")


@pytest.mark.parametrize("verb", ["stop", "start"])
@in_process
async def test_a_node_that_cannot_be_switched_is_as_before(made: InProcess, verb: str) -> None:
    await made.call("nodes.create", NODE, nodeId="n")
    if verb == "start":
        await made.call("nodes.stop")
    before = made.state("node")
    with failing("EmulatedWorkers.halt"), failing("EmulatedWorkers.boot"):
        failed = await made.call(f"nodes.{verb}")
    assert MISTAKE in failed["error"]["message"]
    assert made.state("node") == before


@in_process
async def test_a_queued_resource_that_cannot_be_served_has_failed(made: InProcess) -> None:
    with failing("EmulatedWorkers.boot"):
        await made.call("queuedResources.create", QUEUED, queuedResourceId="q")
    [state] = made.state("queued")
    assert state["state"] == "FAILED"
    assert MISTAKE in state["failedData"]["error"]["message"]
    assert made.state("node") == []
    assert len(made.mistakes()) == 1


@in_process
async def test_a_queued_resource_whose_deletion_fails_can_be_deleted(made: InProcess) -> None:
    await made.call("queuedResources.create", QUEUED, queuedResourceId="q")
    with failing("kill_marked"):
        failed = await made.call("queuedResources.delete", force="true")
    assert MISTAKE in failed["error"]["message"]
    assert [state["state"] for state in made.state("queued")] == ["ACTIVE"]
    assert made.state("node") == ["READY"]
    assert "error" not in await made.call("queuedResources.delete", force="true")
    assert made.state("queued") == made.state("node") == []


@in_process
async def test_a_fault_that_cannot_strike_is_on_record(made: InProcess) -> None:
    await made.call("nodes.create", NODE, nodeId="n")
    with failing("kill_marked"):
        made.cloud.faults.register("f", [{"kind": "preempted", "after_seconds": 0}], 0.0)
        await asyncio.wait(set(made.cloud.faults._timers))
        await asyncio.sleep(0)
    [traceback] = made.mistakes()
    assert "KeyError: 'ppid'" in traceback

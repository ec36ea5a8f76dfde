"""Real programs on emulated workers: the storage clients, and jax.distributed with Orbax."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncssh
import pytest

from tests.controller.localcloud.harness import EmulatedCloud

HERE = Path(__file__).parent


async def run_everywhere(cloud: EmulatedCloud, node: dict[str, object], script: Path, arguments: str) -> list[object]:
    """Copies a script to every worker and runs it on all of them at once."""

    async def one(worker: int) -> asyncssh.SSHCompletedProcess:
        connection = await cloud.connect(node, worker)
        try:
            await asyncssh.scp(script, (connection, script.name))
            return await connection.run(f"python3 {script.name} {arguments}", timeout=300)
        finally:
            connection.close()
            await connection.wait_closed()

    endpoints = node["networkEndpoints"]
    assert isinstance(endpoints, list)
    done = await asyncio.gather(*(one(worker) for worker in range(len(endpoints))))
    for result in done:
        assert result.exit_status == 0, f"{result.stdout}\n{result.stderr}"
    return [result.stdout for result in done]


def test_every_storage_client_works_on_a_worker(cloud: EmulatedCloud) -> None:
    cloud.create_network("clients")
    node = cloud.create_node("clients", "clients")
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": "clients"})
    endpoint = cloud.endpoint
    arguments = f"clients {endpoint['roots']['storage']} {endpoint['token']} gs://clients/tb"
    (out,) = asyncio.run(run_everywhere(cloud, node, HERE / "client_libraries.py", arguments))
    uses = ("gcsfs", "epath", "tensorstore", "google_api_client", "tensorboard")
    assert str(out).split() == [f"use_{name}" for name in uses]
    by_client = {entry["client"] for entry in cloud.request_log() if entry["call"] == "objects.insert"}
    assert f"{node['id']}/0" in by_client


@pytest.mark.e2e
def test_jax_distributed_over_ssh_on_two_workers(cloud: EmulatedCloud) -> None:
    cloud.create_network("pod")
    node = cloud.create_node("pod", "pod", "v5p-16")
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": "checkpoints"})
    outputs = asyncio.run(run_everywhere(cloud, node, HERE / "distributed_program.py", "gs://checkpoints/run"))
    assert [str(output).splitlines()[-1] for output in outputs] == ["processes 2 devices 8"] * 2

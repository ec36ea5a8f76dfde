"""The pod: the slice itself, and what must be true on each of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import conf
from conf.schema import Config
from controller.resource import Resource
from controller.resources.code import CodeArchive
from controller.resources.node import Node
from controller.resources.workers import RunConfig, SshAccess, Venv, Verified, WorkerCode

LOCK = Path(conf.__file__).with_name("requirements.txt")


def node_resource(config: Config, needs: tuple[str, ...]) -> Node:
    return Node(
        name=config.pod_name,
        zone=config.tpu.zone,
        workers=config.topology.workers,
        service_account=config.cloud.service_account,
        max_create_attempts=config.recovery.max_create_attempts,
        create_seconds=60 * config.tpu.create_minutes,
        accelerator_type=config.tpu.accelerator_type,
        runtime_version=config.tpu.runtime_version or config.topology.runtime_version,
        capacity=config.tpu.capacity,
        network=config.network.name,
        subnetwork=config.network.subnet_in(config.region),
        external_ip=config.tpu.external_ip,
        needs=needs,
    )


def worker_resources(config: Config, node: Node, code: CodeArchive, run_id: str, run_yaml: str) -> Iterator[Resource]:
    n = node.workers
    lock = LOCK.read_text() if config.env.packages == "lock" else ""
    venv = Venv.wanted_on(n, config.env, lock, node=node.id, needs=(f"ssh/{node.name}",))
    asks = {"venv": venv.name, "code": code.name, "run_id": run_id}
    ssh = SshAccess(name=node.name, node=node.id, asks=asks, reachable=("yes",) * n, needs=(node.id,))
    yield ssh
    yield venv
    shipped = WorkerCode(
        name=code.name, node=node.id, bucket=code.bucket, archive=code, tree=(code.name,) * n, needs=(ssh.id, code.id)
    )
    yield shipped
    placed = RunConfig.wanted_on(n, run_id, run_yaml, config.env.vars, node=node.id, needs=(ssh.id,))
    yield placed
    yield Verified(
        name=node.name,
        node=node.id,
        venv=venv.fingerprint_argument,
        backend="cpu" if config.cloud.kind == "local" else "tpu",
        devices=(config.topology.devices_per_worker,) * n,
        reach_worker_0=(True,) * n,
        probe_devices=config.program.kind == "trainer",
        needs=(venv.id, shipped.id, placed.id),
    )

"""What must be true on each worker of the pod before the program can start there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import conf
from conf.schema import Config
from controller.errors import ConfigError
from controller.requirements import Requirements, read
from controller.resource import Resource
from controller.resources.code import CodeArchive
from controller.resources.node import Node
from controller.resources.setup import Setup
from controller.resources.venv import Venv
from controller.resources.watchdog import Watchdog
from controller.resources.wheels import Wheels
from controller.resources.workers import RunConfig, SshAccess, Verified, WorkerCode
from controller.snapshot import Snapshot

LOCK = Path(conf.__file__).with_name("requirements.txt")


def requirements_of(config: Config, code: Snapshot) -> Requirements:
    """What the venv is to hold beside its Python.

    Raises:
        ConfigError: the requirements file is not in what is shipped, or cannot be used.
    """
    if config.env.packages == "lock":
        return Requirements(LOCK.read_text())
    if config.env.packages != "requirements" or config.env.requirements is None:
        return Requirements("")
    name = Path(config.env.requirements).as_posix()
    if name not in code.files:
        raise ConfigError(f"env.requirements: {name} is not among the files that are shipped from {code.root}")
    return read(code.root, name)


def guarded(config: Config) -> bool:
    """Is there a reason for which the pod should delete itself? An adopted one is never deleted."""
    limits = (config.cleanup.idle_minutes, config.budget.max_hours, config.budget.max_usd)
    return any(limit is not None for limit in limits) and not config.tpu.adopt


def worker_resources(
    config: Config,
    node: Node,
    code: CodeArchive,
    run_id: str,
    run_yaml: str,
    requirements: Requirements,
    wheels: Wheels | None,
) -> Iterator[Resource]:
    n = node.workers
    ssh_id = f"{SshAccess.kind}/{node.name}"
    needs = (ssh_id, *((wheels.id,) if wheels else ()))
    venv = Venv.wanted_on(
        n,
        config,
        requirements.text,
        node=node.id,
        bucket=code.bucket,
        wheels=wheels.id if wheels else None,
        needs=needs,
    )
    asks = {"venv": venv.name, "code": code.name, "run_id": run_id}
    ssh = SshAccess(name=node.name, node=node.id, asks=asks, reachable=("yes",) * n, needs=(node.id,))
    yield ssh
    if guarded(config):
        minutes = config.cleanup.idle_minutes
        idle = None if minutes is None else 60 * minutes
        yield Watchdog(name=node.name, node=node.id, bucket=code.bucket, idle_seconds=idle, needs=(ssh.id,))
    yield venv
    shipped = WorkerCode(
        name=code.name, node=node.id, bucket=code.bucket, archive=code, tree=(code.name,) * n, needs=(ssh.id, code.id)
    )
    yield shipped
    placed = RunConfig.wanted_on(n, run_id, run_yaml, config.env.vars, node=node.id, needs=(ssh.id,))
    yield placed
    ready = (venv.id, shipped.id, placed.id)
    if config.program.setup:
        setup = Setup.wanted_on(
            n, run_id, config.program.setup, code.name, venv.name, node=node.id, needs=ready
        )  # fmt: skip
        yield setup
        ready = (setup.id,)
    yield Verified(
        name=node.name,
        node=node.id,
        venv=venv.name,
        backend="cpu" if config.cloud.kind == "local" else "tpu",
        devices=(config.topology.devices_per_worker,) * n,
        reach_worker_0=(True,) * n,
        probe_devices=config.program.kind == "trainer",
        needs=ready,
    )

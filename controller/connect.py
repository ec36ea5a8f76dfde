"""Build the `World` that a config names: Google Cloud, or the emulated one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.cloud import LocalCloud
from conf.schema import Config
from controller.clock import Clock
from controller.credentials import application_default, default_project
from controller.emulator import Emulator, ensure_running
from controller.errors import ConfigError
from controller.events import Events
from controller.google import Google
from controller.resources.node import Node
from controller.world import World

if TYPE_CHECKING:
    from controller.ssh import Fleet

NO_PROJECT = "your-project"
"""Stands for the project in a plan made without one."""
PACE_SECONDS = 5.0
LOCAL_PACE_SECONDS = 0.2


def project_of(config: Config) -> str:
    """The project, or `your-project` where nothing names one (which `up` refuses)."""
    return config.cloud.project or default_project() or NO_PROJECT


def connect(config: Config) -> tuple[World, Emulator | None]:
    """Open the way to the cloud; starts the emulated one on demand.

    Raises:
        ConfigError: the state folder cannot be written, the emulated cloud cannot start.
    """
    state = Path(config.run.state_dir).expanduser()
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state / "keys").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.state_dir: {state} cannot be written: {error.strerror}") from None
    clock = Clock()
    if isinstance(config.cloud, LocalCloud):
        emulator = ensure_running(config.cloud, config.run.state_dir)
        from google.oauth2.credentials import Credentials

        google = Google(Credentials(token=emulator.token), clock, emulator.roots)
        pace, ssh_config = LOCAL_PACE_SECONDS, emulator.ssh_config
    else:
        emulator, google = None, Google(application_default(), clock)
        pace, ssh_config = PACE_SECONDS, None
    world = World(
        project=project_of(config),
        google=google,
        clock=clock,
        events=Events(clock),
        state=state,
        ssh_user=config.ssh.user,
        pace=pace,
        make_fleet=lambda world, node: _fleet(world, node, config, ssh_config),
        billed=emulator is None,
    )
    return world, emulator


def _fleet(world: World, node: Node, config: Config, ssh_config: Path | None) -> Fleet:
    from controller.keys import private_key
    from controller.ssh import Access, Fleet

    access = Access(
        pod=node.name,
        user=config.ssh.user,
        key=private_key(world.state / "keys"),
        addresses=[endpoint.external or endpoint.internal for endpoint in node.endpoints],
        host_keys=lambda: host_keys(world, node),
        ssh_config=ssh_config,
        connect_seconds=config.ssh.connect_seconds,
        warm_up_seconds=config.ssh.warm_up_seconds,
    )
    return Fleet(access, world.clock.sleep)


def host_keys(world: World, node: Node) -> list[str]:
    """The SSH host keys that each worker published as guest attributes, `TYPE KEY` per line, by worker.

    https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/getGuestAttributes
    """
    answer = world.google.call(
        "tpu", "projects.locations.nodes.getGuestAttributes", name=node.path(world), body={"workerIds": [""]}
    )
    return [_lines(worker) for worker in answer.get("guestAttributes", [])]


def _lines(worker: dict[str, Any]) -> str:
    items = worker.get("queryValue", {}).get("items", [])
    return "\n".join(f"{i['key']} {i['value']}" for i in items if i.get("namespace") == "hostkeys")

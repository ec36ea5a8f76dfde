"""Build the `World` that a config names: Google Cloud, or the emulated one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.cloud import LocalCloud
from conf.schema import Config
from controller.clock import Clock
from controller.credentials import application_default, default_project
from controller.emulator import Emulator, ensure_running, in_use, state_folder
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


@contextmanager
def connected(config: Config, *, keep_awake: bool = False) -> Iterator[tuple[World, Emulator | None]]:
    """Open the way to the cloud and close it again; the emulated one is started on demand.

    Args:
        keep_awake: leave the emulated cloud running; else the last one out puts it to sleep if it holds no node.

    Raises:
        ConfigError: the state folder cannot be written, the emulated cloud cannot start.
    """
    state = _state_folder(config)
    emulator: Emulator | None = None
    try:
        with ExitStack() as stack:
            if isinstance(config.cloud, LocalCloud):
                stack.enter_context(in_use(state_folder(config.run.state_dir)))
                emulator = ensure_running(config.cloud, config.run.state_dir)
            world = _world(config, state, emulator)
            stack.callback(world.close)
            yield world, emulator
    finally:
        if emulator is not None and not keep_awake:
            emulator.stop_if_empty()


def _state_folder(config: Config) -> Path:
    state = Path(config.run.state_dir).expanduser()
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state / "keys").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.state_dir: {state} cannot be written: {error.strerror}") from None
    return state


def _world(config: Config, state: Path, emulator: Emulator | None) -> World:
    clock = Clock()
    if emulator is not None:
        from google.oauth2.credentials import Credentials

        google = Google(Credentials(token=emulator.token), clock, emulator.roots)
        pace, ssh_config = LOCAL_PACE_SECONDS, emulator.ssh_config
    else:
        google = Google(application_default(), clock)
        pace, ssh_config = PACE_SECONDS, None
    return World(
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

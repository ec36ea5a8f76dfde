"""Build the `Context` that a config names: Google Cloud, or the emulated one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from conf.schema.config import Config
from conf.schema.infra.cloud import PROJECT, LocalCloud
from controller.cloud.emulator import Emulator, ensure_running, mark_in_use, state_folder
from controller.context import Context
from controller.core.clock import Clock
from controller.core.errors import ConfigError
from controller.core.events import Events
from controller.gcp.client import GoogleClient
from controller.gcp.credentials import application_default_credentials, default_project
from controller.ssh.iap import ENDPOINT
from controller.ssh.public_ip import find_public_ip
from controller.ssh.route import open_fleet

NO_PROJECT = "your-project"
"""Stands for the project in a plan made without one."""
POLL_SECONDS = 5.0
LOCAL_POLL_SECONDS = 0.2
LOOPBACK = "127.0.0.1"
"""Where the emulated cloud sees us."""


def project_of(config: Config) -> str:
    """The project, or `your-project` where nothing names one (which `up` refuses).

    Raises:
        ConfigError: what the environment or gcloud names is no project.
    """
    found = config.cloud.project or default_project() or NO_PROJECT
    if not re.fullmatch(PROJECT, found):
        words = "comes from GOOGLE_CLOUD_PROJECT or gcloud's configuration, and is no project id; set cloud.project"
        raise ConfigError(f"cloud.project: {found!r} {words}")
    return found


@contextmanager
def open_context(config: Config, *, keep_awake: bool = False) -> Iterator[tuple[Context, Emulator | None]]:
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
                stack.enter_context(mark_in_use(state_folder(config.run.state_dir)))
                emulator = ensure_running(config.cloud, config.run.state_dir)
            world = _build_context(config, state, emulator)
            stack.callback(world.close)
            yield world, emulator
    finally:
        if emulator is not None and not keep_awake:
            emulator.stop_if_empty()


def _state_folder(config: Config) -> Path:
    state = Path(config.run.state_dir).expanduser()
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.state_dir: {state} cannot be written: {error.strerror}") from None
    found = state.stat()
    if found.st_mode & 0o022 or (os.getuid() and found.st_uid != os.getuid()):
        words = "belongs to another user, or others may write there, and it holds keys"
        raise ConfigError(f"run.state_dir: {state} {words}; `chmod go-w` it, or choose another folder")
    return state


def _build_context(config: Config, state: Path, emulator: Emulator | None) -> Context:
    clock = Clock()
    if emulator is not None:
        from google.oauth2.credentials import Credentials

        google = GoogleClient(Credentials(token=emulator.token), clock, emulator.roots)
        pace, ssh_config = LOCAL_POLL_SECONDS, emulator.ssh_config
    else:
        google = GoogleClient(application_default_credentials(), clock)
        pace, ssh_config = POLL_SECONDS, None
    return Context(
        project=project_of(config),
        google=google,
        clock=clock,
        events=Events(clock),
        state=state,
        ssh_user=config.ssh.user,
        pace=pace,
        make_fleet=lambda world, node: open_fleet(world, node, config, ssh_config),
        billed=emulator is None,
        find_public_ip=cache(find_public_ip) if emulator is None else lambda: LOOPBACK,
        iap=ENDPOINT if emulator is None else emulator.iap,
        os_login=None if config.ssh.os_login == "auto" else config.ssh.os_login,
    )

"""Connect to the cloud of a config: Google's, this machine, or the emulated cloud, which is started on demand."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from conf.schema.cloud import PROJECT, HereCloud, LocalCloud
from conf.schema.config import Config
from controller.config.run_yaml import bucket_name
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.events import Events
from controller.core.this_process import Clock
from controller.emulator import Emulator, ensure_running, mark_in_use, state_folder
from controller.gcp.client import GoogleClient
from controller.gcp.credentials import NO_PROJECT, application_default_credentials, default_project, missing_project
from controller.gcp.folder_store import FolderClient
from controller.here import open_fleet
from controller.ssh.login import Login
from controller.ssh.route import IAP_ENDPOINT, PodConnector, find_public_ip

HERE = "here"
"""Stands in place of a project for `cloud=here`."""
POLL_SECONDS = 5.0
LOCAL_POLL_SECONDS = 0.2
LOOPBACK = "127.0.0.1"
"""This machine's address as the emulated cloud sees it."""


def project_of(config: Config) -> str:
    """Return the project, or `your-project` if none is set; see `require_project`.

    Raises ConfigError if the value from the environment or gcloud is not a project id.
    """
    if isinstance(config.cloud, HereCloud):
        return HERE
    found = config.cloud.project or default_project() or NO_PROJECT
    if not re.fullmatch(PROJECT, found):
        message = "from GOOGLE_CLOUD_PROJECT or gcloud's configuration is not a valid project ID; set cloud.project"
        raise ConfigError(f"cloud.project: {found!r} {message}")
    return found


def require_project(project: str) -> str:
    """Return the project. Raises ConfigError if no project is set."""
    if message := missing_project(project):
        raise ConfigError(f"cloud.project: {message}, or set cloud=local")
    return project


def require_pods(config: Config) -> None:
    """Raise ConfigError for `cloud=here`, which has no project and no pods."""
    if isinstance(config.cloud, HereCloud):
        raise ConfigError("cloud=here has no project and no pods; set cloud=gcp or cloud=local")


@contextmanager
def open_context(config: Config, *, keep_awake: bool = False) -> Iterator[tuple[Context, Emulator | None]]:
    """Open the context of a config and close it after the block; the emulated cloud is started on demand.

    Raises ConfigError if the state folder is not writable, or the emulated cloud cannot start.

    Args:
        keep_awake: leave the emulated cloud running; otherwise its last user stops it if it holds no node.
    """
    state = _state_folder(config)
    emulator: Emulator | None = None
    try:
        with ExitStack() as stack:
            if isinstance(config.cloud, LocalCloud):
                stack.enter_context(mark_in_use(state_folder(config.run.state_dir)))
                emulator = ensure_running(config.cloud, config.run.state_dir)
            context = _build_context(config, state, emulator)
            stack.callback(context.close)
            yield context, emulator
    finally:
        if emulator is not None and not keep_awake:
            emulator.stop_if_empty()


def opening_message(config: Config) -> str:
    """Say what `open_context` does."""
    if isinstance(config.cloud, LocalCloud):
        return "starting the emulated cloud"
    return "opening this machine" if isinstance(config.cloud, HereCloud) else "connecting to Google Cloud"


def _state_folder(config: Config) -> Path:
    state = Path(config.run.state_dir).expanduser()
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.state_dir: cannot write to {state}: {error.strerror}") from None
    found = state.stat()
    if found.st_mode & 0o022 or (os.getuid() and found.st_uid != os.getuid()):
        message = "holds keys, but belongs to another user or is writable by others"
        raise ConfigError(f"run.state_dir: {state} {message}; run `chmod go-w {state}`, or choose another folder")
    return state


def _build_context(config: Config, state: Path, emulator: Emulator | None) -> Context:
    clock, project = Clock(), project_of(config)
    if isinstance(config.cloud, HereCloud):
        return _this_machine(config, config.cloud, clock, state)
    if emulator is None:
        quota_project = None if project == NO_PROJECT else project
        google = GoogleClient(application_default_credentials(quota_project), clock)
        return make_context(config, project, google, clock, state, find_public_ip=cache(find_public_ip))
    from google.oauth2.credentials import Credentials

    credentials = Credentials(token=None, quota_project_id=emulator.project, **emulator.credentials)
    google = GoogleClient(credentials, clock, emulator.roots)
    return make_context(
        config,
        project,
        google,
        clock,
        state,
        poll_seconds=LOCAL_POLL_SECONDS,
        iap=emulator.iap,
        ssh_config=emulator.ssh_config,
        find_public_ip=lambda: LOOPBACK,
    )


def _this_machine(config: Config, cloud: HereCloud, clock: Clock, state: Path) -> Context:
    """Build the context of `cloud=here`: a folder is the bucket, and the only worker is this machine."""
    google = FolderClient(clock)
    return Context(
        project=HERE,
        google=google,
        clock=clock,
        events=Events(clock),
        state_dir=state,
        ssh_login=Login(google, clock, HERE, config.ssh.user, state),
        poll_seconds=LOCAL_POLL_SECONDS,
        make_fleet=lambda pod: open_fleet(cloud, state),
        is_billed=False,
        bucket=bucket_name(config, HERE),
    )


def make_context(
    config: Config,
    project: str,
    google: GoogleClient,
    clock: Clock,
    state: Path,
    *,
    poll_seconds: float = POLL_SECONDS,
    iap: str = IAP_ENDPOINT,
    ssh_config: Path | None = None,
    find_public_ip: Callable[[], str | None] = lambda: None,
    extra_ssh_keys: tuple[str, ...] = (),
) -> Context:
    """Build a context.

    Args:
        state: folder of keys and records.
        poll_seconds: seconds between polls of pending operations.
        iap: endpoint of the Identity-Aware Proxy.
        ssh_config: OpenSSH config to use instead of the user's.
        find_public_ip: see `Context`.
        extra_ssh_keys: see `Context`.
    """
    logging.getLogger("googleapiclient.http").setLevel(logging.ERROR)  # it warns of each 403; our errors say more
    os_login = None if config.ssh.os_login == "auto" else config.ssh.os_login
    login, events = Login(google, clock, project, config.ssh.user, state, os_login, poll_seconds), Events(clock)
    google.tell_waits(lambda message: events.note("google", message))
    return Context(
        project=project,
        google=google,
        clock=clock,
        events=events,
        state_dir=state,
        ssh_login=login,
        poll_seconds=poll_seconds,
        make_fleet=PodConnector(config, google, clock, login, find_public_ip, iap, ssh_config).connect,
        is_billed=config.cloud.kind != "local",
        find_public_ip=find_public_ip,
        extra_ssh_keys=extra_ssh_keys,
        bucket=bucket_name(config, project),
    )

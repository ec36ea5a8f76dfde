"""Connect to the cloud of a config: Google's, this machine, or the emulated cloud, which is started on demand.

The emulated cloud runs as a separate program and is reached over HTTP like Google. The controller never imports it.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from conf.schema.cloud import PROJECT, HereCloud, LocalCloud
from conf.schema.config import Config
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.events import Events
from controller.core.this_process import Clock, own_program
from controller.gcp.client import GoogleClient
from controller.gcp.credentials import application_default_credentials, default_project
from controller.gcp.folder_store import FolderClient
from controller.here import open_fleet
from controller.plan.project_steps import bucket_name
from controller.ssh.login import Login
from controller.ssh.route import IAP_ENDPOINT, PodConnector, find_public_ip

IDLE_EXIT_SECONDS = 600


@dataclass(frozen=True)
class Emulator:
    """A running emulated cloud, as its `endpoint.json` describes it."""

    state: Path
    url: str
    token: str
    roots: dict[str, str]
    project: str
    ssh_config: Path

    @property
    def iap(self) -> str:
        """Return the endpoint of its Identity-Aware Proxy."""
        return f"{self.url.replace('http', 'ws', 1)}/iap/v4"

    @property
    def credentials(self) -> dict[str, Any]:
        """Return a user's credentials as google-auth takes them: they get access tokens, which expire."""
        client = {"client_id": "slipway", "client_secret": "slipway"}  # any will do
        return {"refresh_token": self.token, "token_uri": f"{self.url}/token", **client}

    def post(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the emulator's own API, which no real cloud has."""
        return json.loads(self._ask(name, json.dumps(body).encode()))

    def inject_faults(self, run_id: str, cloud: object) -> None:
        """Pass the faults of a config; the same script runs once per run."""
        faults = list(cloud.faults) if isinstance(cloud, LocalCloud) else []
        if faults:
            key = hashlib.sha256(json.dumps([run_id, faults], sort_keys=True).encode()).hexdigest()
            self.post("faults", {"key": key, "faults": faults})

    def delete(self, name: str) -> None:
        self._ask(name, None, "DELETE")

    def get(self, name: str) -> dict[str, Any]:
        return json.loads(self._ask(name, None))

    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._ask("requests", None).splitlines()]

    def stop_if_empty(self) -> None:
        """Stop the emulator if it holds no node and no other controller uses it. The state stays on disk.

        If another controller uses it, the last one to finish stops it.
        """
        with (self.state / "users").open("a") as users:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            state = self.get("state")
            if not (state["node"] or state["queued"] or any("/instances/" in path for path in state["compute"])):
                run_emulator_verb(["stop"], self.state)

    def _ask(self, name: str, body: bytes | None, method: str | None = None) -> str:
        import urllib.error
        import urllib.request

        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/emulator/{name}", data=body, headers=headers, method=method)  # noqa: S310 - loopback
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                return answer.read().decode()
        except urllib.error.HTTPError as error:  # its errors are written for the user
            raise ConfigError(json.load(error)["error"]["message"]) from None


def state_folder(state_dir: str) -> Path:
    return Path(state_dir).expanduser() / "localcloud"


def ensure_running(cloud: LocalCloud, state_dir: str) -> Emulator:
    """Start the emulated cloud unless it is already running. Raises ConfigError with its message if it cannot."""
    folder = state_folder(state_dir)
    emulator = find_answering(folder) or _start(folder, cloud)
    wanted = {"realism": cloud.realism, "caller_roles": list(cloud.caller_roles), "quotas": cloud.quotas}
    emulator.post("settings", wanted)  # it may have been running
    return emulator


def _start(folder: Path, cloud: LocalCloud) -> Emulator:
    seconds = f"--operation-seconds={cloud.operation_seconds}"
    flags = [f"--port={cloud.port}", seconds, f"--realism={cloud.realism}", f"--idle-exit={IDLE_EXIT_SECONDS}"]
    status, message = run_emulator_verb(["start", *flags], folder)
    if status != 0:
        raise ConfigError(message.strip() or f"the emulated cloud exited with code {status}; see {folder}/server.log")
    return find_running(folder)


def find_answering(folder: Path) -> Emulator | None:
    """Return the emulated cloud of a state folder if it answers. Starting a program that finds out takes longer."""
    try:
        process = json.loads((folder / "endpoint.json").read_text())["pid"]
        emulator = find_running(folder)
        answered = emulator.get("settings")["pid"]
    except (OSError, ValueError, KeyError, ConfigError):
        return None  # left behind by a killed server, or unreadable
    return emulator if answered == process else None  # its successor may answer before it has written the file


def find_running(folder: Path) -> Emulator:
    """Return the emulated cloud that runs on a state folder."""
    found = json.loads((folder / "endpoint.json").read_text())
    return Emulator(
        folder, found["url"].rstrip("/"), found["token"], found["roots"], found["project"], Path(found["ssh_config"])
    )


@contextmanager
def mark_in_use(folder: Path) -> Iterator[None]:
    """Keep other controllers from stopping the emulated cloud of that folder during the block."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(folder / "users", "a", opener=lambda path, flags: os.open(path, flags, 0o600)) as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        yield


def is_idle(folder: Path) -> bool:
    """Return whether no controller uses the emulated cloud of that folder."""
    with (folder / "users").open("a") as users:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def run_emulator_verb(arguments: Sequence[str], folder: Path, *, show: bool = False) -> tuple[int, str]:
    """Run `python -m controller.localcloud VERB --state FOLDER` and return its exit code and stderr."""
    argv = own_program("controller.localcloud", arguments[0], f"--state={folder}", *arguments[1:])
    done = subprocess.run(
        argv, stdout=None if show else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stderr


HERE = "here"
"""Stands in place of a project for `cloud=here`."""
NO_PROJECT = "your-project"
"""Placeholder for the project in a plan made without one."""
POLL_SECONDS = 5.0
LOCAL_POLL_SECONDS = 0.2
LOOPBACK = "127.0.0.1"
"""This machine's address as the emulated cloud sees it."""


def project_of(config: Config) -> str:
    """Return the project, or `your-project` if none is set; see `require_project`.

    Raises:
        ConfigError: the value from the environment or gcloud is not a project id.
    """
    if isinstance(config.cloud, HereCloud):
        return HERE
    found = config.cloud.project or default_project() or NO_PROJECT
    if not re.fullmatch(PROJECT, found):
        message = "from GOOGLE_CLOUD_PROJECT or gcloud's configuration is not a valid project ID; set cloud.project"
        raise ConfigError(f"cloud.project: {found!r} {message}")
    return found


def missing_project(project: str) -> str:
    """Return instructions if no project is set, else ''."""
    if project != NO_PROJECT:
        return ""
    return "is not set; set it, or run `gcloud config set project ID` (`gcloud projects list` lists yours)"


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

    Args:
        keep_awake: leave the emulated cloud running; otherwise its last user stops it if it holds no node.

    Raises:
        ConfigError: the state folder is not writable, or the emulated cloud cannot start.
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
    login = Login(google, clock, project, config.ssh.user, state, os_login, poll_seconds)
    return Context(
        project=project,
        google=google,
        clock=clock,
        events=Events(clock),
        state_dir=state,
        ssh_login=login,
        poll_seconds=poll_seconds,
        make_fleet=PodConnector(config, google, clock, login, find_public_ip, iap, ssh_config).connect,
        is_billed=config.cloud.kind != "local",
        find_public_ip=find_public_ip,
        extra_ssh_keys=extra_ssh_keys,
        bucket=bucket_name(config, project),
    )

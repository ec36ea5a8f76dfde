"""The emulated cloud of a state folder: find it, start it on demand, and call its own API.

It runs as a separate program and is reached over HTTP like Google. The controller never imports it.
"""

import fcntl
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema.cloud import LocalCloud
from conf.strict_json import dumps
from controller.core.errors import ConfigError
from controller.core.this_process import own_program

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
        return json.loads(self._ask(name, dumps(body).encode()))

    def inject_faults(self, run_id: str, cloud: object) -> None:
        """Pass the faults of a config; the same script runs once per run."""
        faults = list(cloud.faults) if isinstance(cloud, LocalCloud) else []
        if faults:
            key = hashlib.sha256(dumps([run_id, faults], sort_keys=True).encode()).hexdigest()
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
        from urllib.request import ProxyHandler, Request, build_opener

        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = Request(f"{self.url}/emulator/{name}", data=body, headers=headers, method=method)  # noqa: S310 - loopback
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=30) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:  # its errors are written for the user
            raise ConfigError(json.load(error)["error"]["message"]) from None


def state_folder(state_dir: str) -> Path:
    return Path(state_dir).expanduser() / "localcloud"


def ensure_running(cloud: LocalCloud, state_dir: str) -> Emulator:
    """Start the emulated cloud unless it is already running. Raises ConfigError with its message if it cannot."""
    folder = state_folder(state_dir)
    emulator = find_answering(folder) or _start(folder, cloud)
    if cloud.port and not emulator.url.endswith(f":{cloud.port}"):
        cure = "leave cloud.port out, or end it with `slipway localcloud stop`"
        raise ConfigError(f"cloud.port: the emulated cloud runs already, at {emulator.url}; {cure}")
    wanted = {"operation_seconds": cloud.operation_seconds, "realism": cloud.realism, "quotas": cloud.quotas}
    emulator.post("settings", {**wanted, "caller_roles": list(cloud.caller_roles)})  # it may have been running
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

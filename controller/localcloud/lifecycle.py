"""Starts, finds, stops and wipes an emulated cloud from outside its process."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from conf.proxies import settle_proxies
from controller.core.this_process import own_program
from controller.localcloud.vms.processes import kill_marked, wait_ended

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0


class NotRunningError(Exception):
    """No emulated cloud is running on this state folder."""


def find_endpoint(state: Path) -> dict[str, Any] | None:
    """Return endpoint.json if its server answers, else None."""
    try:
        found = json.loads((state / "endpoint.json").read_text())
        answer = json.loads(request_admin(found, "GET", "settings"))
    except (FileNotFoundError, NotADirectoryError, urllib.error.URLError, ConnectionError, TimeoutError):
        return None  # absent, or left behind by a killed server
    except (ValueError, KeyError, TypeError):
        return None  # damaged: a start writes it again
    # A killed server may have left the file while its successor already answers.
    return found if answer["pid"] == found["pid"] else None


def request_admin(found: Mapping[str, Any], method: str, path: str, body: Any = None) -> bytes:
    """Send a request to the emulator's own API; never through a proxy; failures raise urllib's errors."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(  # noqa: S310 (the URL is our own)
        f"{found['url']}emulator/{path}",
        data=data,
        method=method,
        headers={"Authorization": f"Bearer {found['token']}", "Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as response:
        return response.read()


def start(state: Path, flags: Sequence[str]) -> int:
    """Run `serve` in its own session; return 0 once it answers, or its exit code after printing its log to stderr.

    `flags` may hold another spelling of `--state`.
    """
    state = state.absolute()
    if find_endpoint(state):
        return 0
    log_path = state / "server.log"
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = log_path.open("ab")
    except OSError as error:
        print(f"run.state_dir: cannot write to {state}: {error.strerror}", file=sys.stderr)
        return 2
    offset = log.tell()
    with log:
        process = subprocess.Popen(
            own_program("controller.localcloud", "serve", *flags, "--state", str(state)),
            cwd=state,  # keeps no folder of the user's busy
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            with log_path.open("rb") as written:
                written.seek(offset)
                sys.stderr.write(written.read().decode(errors="replace"))
            return 0 if find_endpoint(state) else code
        if found := find_endpoint(state):
            if found["pid"] != process.pid:  # two concurrent starts: the other one won
                process.kill()
                process.wait()
            process.returncode = 0  # it keeps running; suppresses the ResourceWarning
            return 0
        time.sleep(0.02)
    process.kill()
    process.wait()
    print(f"the emulated cloud did not start within {_START_SECONDS:.0f} s; see {log_path}", file=sys.stderr)
    return 2


def stop(state: Path, *, programs: bool = False) -> None:
    """Stop the server, if one is running; the state stays.

    Args:
        programs: kill every process of every worker too; otherwise they keep running.
    """
    with suppress(psutil.NoSuchProcess):
        if found := find_endpoint(state):
            server = psutil.Process(found["pid"])
            request_admin(found, "POST", "stop")
            if not wait_ended(server, _STOP_SECONDS):
                server.kill()
                wait_ended(server, _STOP_SECONDS)
    if programs:
        from controller.localcloud.vms.image import process_marker  # reads tables, which a plain stop does not need

        kill_marked(process_marker(state.resolve()))


def wipe(state: Path) -> None:
    """Stop the server, kill every process of every worker and delete the state folder."""
    state = state.resolve()
    stop(state, programs=True)
    if not (state / "state.db").exists():
        return
    while state.exists():
        with suppress(FileNotFoundError):  # a program of a worker was deleting its files while it was killed
            shutil.rmtree(state)


def client_environment(state: Path) -> dict[str, str]:
    """Return the variables that point gcloud and the client libraries here; raise NotRunningError if it is down.

    `no_proxy` is one of them where a proxy is set.
    """
    found = require_endpoint(state)
    settled = dict(os.environ)
    settle_proxies(settled)
    url, token = found["url"], found["token"]
    gcloud = {
        api: found["roots"][api] for api in ("tpu", "serviceusage", "cloudresourcemanager", "iam", "cloudbilling")
    }
    gcloud |= {api: f"{url}{api}/v1/" for api in ("compute", "storage")}
    return {
        **{f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api.upper()}": root for api, root in gcloud.items()},
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(state.absolute() / "token"),
        "CLOUDSDK_CONFIG": str(state.absolute() / "gcloud"),  # leaves the user's own gcloud config alone
        "CLOUDSDK_CORE_PROJECT": found["project"],
        "STORAGE_EMULATOR_HOST": f"{url}t/{token}",
        "TENSORSTORE_GCS_HTTP_URL": f"{url}t/{token}",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "NO_GCE_CHECK": "true",
        **{name: settled[name] for name in ("no_proxy", "NO_PROXY") if name in settled},
    }


def format_exports(state: Path) -> str:
    """Return `client_environment` as shell commands."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in client_environment(state).items())


def require_endpoint(state: Path) -> dict[str, Any]:
    """Return endpoint.json of the running server; raise NotRunningError if there is none."""
    found = find_endpoint(state)
    if found is None:
        raise NotRunningError(f"no emulated cloud is running on {state}; `slipway localcloud start` starts it")
    return found

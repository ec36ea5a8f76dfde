"""One command per process: its arguments come as JSON on stdin, its answer goes as JSON to stdout."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

from .files import AgentError, locked, read_json, root, write_json

COMMANDS = {
    "observe": "observe",
    "install_code": "code",
    "install_venv": "packages",
    "write_config": "config",
    "tidy": "tidy",
    "run_setup": "setup",
    "fetch_asset": "fetch",
    "probe_devices": "probe",
    "probe_peers": "probe",
    "start": "start",
    "supervise": "start",
    "stop": "ending",
    "state": "attempt",
    "stacks": "stacks",
    "watch": "watch",
    "guard": "guard",
    "guard_state": "guard",
    "stand_guard": "guard",
}
"""The module that holds the function of that name; only this one is loaded."""


def _refuse_older(place: str, token: int) -> None:
    """Refuse what a controller sends that another one has followed; `place` is where they agree on that."""
    with locked("lease"):
        known = read_json(root() / "lease.json") or {}
        if known.get("place") == place and known["token"] > token:
            raise AgentError(f"another controller acts on this pod (lease {known['token']}; this came with {token})")
        if known != (wanted := {"place": place, "token": token}):
            write_json(root() / "lease.json", wanted)


def main() -> int:
    os.umask(0o077)
    code, answer = 0, None
    try:
        name = sys.argv[1]
        command = getattr(import_module(f".{COMMANDS[name]}", __package__), name)
        payload = json.loads(sys.stdin.buffer.read() or b"{}")
        if lease := payload.pop("lease", None):
            _refuse_older(*lease)
        answer = command(**payload)
    except AgentError as error:
        code, answer = 1, {"error": str(error), "detail": error.detail}
    except BrokenPipeError:  # who watched has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except Exception as error:
        import traceback

        code, answer = 1, {"error": f"{type(error).__name__}: {error}", "detail": traceback.format_exc()}
    if answer is not None:
        print(json.dumps(answer), flush=True)
    return code

"""One command per process: its arguments come as JSON on stdin, its answer goes as JSON to stdout."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

from .files import AgentError

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


def main() -> int:
    os.umask(0o077)
    code, answer = 0, None
    try:
        name = sys.argv[1]
        command = getattr(import_module(f".{COMMANDS[name]}", __package__), name)
        answer = command(**json.loads(sys.stdin.buffer.read() or b"{}"))
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

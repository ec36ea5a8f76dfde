"""Entry point of the agent: one command per process, JSON arguments on stdin, JSON answer on stdout."""

import errno
import json
import os
import sys
from importlib import import_module

from .fs import (
    AgentError,
    agent_root,
    checked,
    free_gb,
    locked,
    note_worker,
    read_json,
    say,
    write_heartbeat,
    write_json,
)

COMMANDS = {
    "observe": "commands.observe",
    "install_code": "commands.run_inputs",
    "install_venv": "commands.venv",
    "write_config": "commands.run_inputs",
    "fingerprint_data": "commands.run_inputs",
    "tidy": "commands.observe",
    "run_setup": "commands.run_inputs",
    "fetch_asset": "commands.asset",
    "build_asset": "commands.asset",
    "probe_devices": "commands.observe",
    "probe_peers": "commands.observe",
    "check_health": "commands.observe",
    "start": "supervisor",
    "supervise": "supervisor",
    "track": "trackers",
    "stop": "control",
    "state": "attempts",
    "stacks": "commands.stacks",
    "watch": "control",
    "set_watchdog": "watchdog",
    "watchdog_state": "watchdog",
    "run_watchdog": "watchdog",
}
"""Module that defines each command; only the module of the requested command is imported."""


def _check_fencing_token(place: str, token: int) -> None:
    """Reject a command from a controller whose lease has been superseded; `place` is where the lease is stored."""
    with locked("lease"):
        known = read_json(agent_root() / "lease.json", "place", "token") or {}
        if known.get("place") == place and not isinstance(known["token"], int):
            raise AgentError(f"{agent_root() / 'lease.json'} is damaged, so nobody knows who may act: delete it")
        if known.get("place") == place and known["token"] > token:
            raise AgentError(f"another controller has taken over this pod (lease {known['token']}, not {token})")
        if known != (wanted := {"place": place, "token": token}):
            write_json(agent_root() / "lease.json", wanted)


def _full_disk(error: Exception) -> str:
    """Return where no space is left, or "" for any other error. A limit on the size of files counts on a full disk."""
    if not isinstance(error, OSError):
        return ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or (error.errno == errno.EFBIG and free_gb() <= 0.0):
        return f"No space left on device: {error.filename or agent_root()}"
    return ""


def main() -> int:
    os.umask(0o077)
    code, answer = 0, None
    write_heartbeat()
    try:
        name = sys.argv[1]
        command = getattr(import_module(f".{COMMANDS[name]}", __package__), name)
        request = sys.stdin.buffer.read()
        payload = checked(json.loads(request), f"the `{name}` request") if request else {}
        note_worker(payload.pop("worker", None))
        if lease := payload.pop("lease", None):
            _check_fencing_token(lease["place"], lease["token"])
        answer = command(**payload)
    except AgentError as error:
        code, answer = 1, {"error": str(error), "detail": error.detail}
    except BrokenPipeError:  # the watching controller has disconnected
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except Exception as error:
        import traceback

        message = _full_disk(error) or f"{type(error).__name__}: {error}"
        code, answer = 1, {"error": message, "detail": traceback.format_exc()}
    if answer is not None:
        say(answer)
    return code

"""State of an attempt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..fs import agent_root, attempt_folder, attempt_number, file_size, read_json, read_range
from ..process import boot_id, is_alive
from ..secrets import SecretMask

if TYPE_CHECKING:
    from ..protocol import Attempt, State

MAX_SUMMARY_BYTES = 1 << 20


def attempt_status(folder: Path) -> dict[str, Any]:
    """Return whether an attempt is absent, running or exited, and how it ended.

    A killed supervisor leaves no record of how its program ended: `lost` means that the end still has to be recorded.
    Liveness is checked first and exit.json last, so that an attempt that ends in between does not look lost.
    """
    begun = read_json(folder / "pid.json")
    if begun is None:
        return {"state": "absent"}
    same_boot = begun["boot_id"] == boot_id()
    program, supervisor = (same_boot and is_alive(begun[who]) for who in ("program", "supervisor"))
    ended = read_json(folder / "exit.json")
    if ended:
        lost = ended["upload"] == "pending" and not supervisor
        return {"state": "exited", **ended, "uploading": supervisor, "lost": lost}
    if supervisor:
        return {"state": "running", "started": begun["started"]}
    if program:
        return {"state": "running", "started": begun["started"], "error": "supervisor lost; the program still runs"}
    error = "supervisor lost" if same_boot else "the worker was restarted"
    return {"state": "exited", "started": begun["started"], "error": error, "lost": True}


def active_attempt() -> Attempt | None:
    """Return the attempt that is alive on this worker, or None."""
    for path in sorted(agent_root().glob("runs/*/attempt-*/pid.json")):
        folder = path.parent
        if not (folder / "exit.json").exists() and attempt_status(folder)["state"] == "running":
            return {"run_id": folder.parent.name, "attempt": attempt_number(folder)}
    return None


def state(run_id: str, attempt: int | None = None, tail_bytes: int = 16384) -> State:
    """Return the state of an attempt (by default the latest), with the end of its log and its summary."""
    folder = attempt_folder(run_id, attempt)
    status = attempt_status(folder)
    mask = SecretMask.for_run(folder.parent)
    size = file_size(folder / "log")
    return {
        "run_id": run_id,
        "attempt": attempt_number(folder),
        "state": status["state"],
        "code": status.get("code"),
        "signal": status.get("signal"),
        "started": status.get("started"),
        "ended": status.get("ended"),
        "error": status.get("error"),
        "oom_kills": status.get("oom_kills"),
        "free_gb": status.get("free_gb"),
        "upload": status.get("upload"),
        "upload_error": status.get("upload_error"),
        "notice": status.get("notice"),
        "log_size": size,
        "log_tail": _log_tail(folder / "log", size, tail_bytes, mask).decode(errors="replace"),
        "summary": _read_summary(folder.parent),
    }


def _log_tail(log: Path, size: int, tail_bytes: int, mask: SecretMask) -> bytes:
    """Return the end of the log, masking secrets that begin before it or are incomplete."""
    begin = max(0, size - tail_bytes)
    early = max(0, begin - mask.max_length)
    data = mask.apply(read_range(log, early, size - early))
    return data[begin - early : len(data) - mask.partial_length(data)]


def _read_summary(run: Path) -> dict[str, Any] | None:
    """Read the program's summary, which may be malformed or huge."""
    path = run / "summary.json"
    if file_size(path) > MAX_SUMMARY_BYTES:
        return {"error": f"summary.json is larger than {MAX_SUMMARY_BYTES} bytes"}
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        return {"error": f"summary.json is not JSON: {error}"}
    return found if found is None or isinstance(found, dict) else {"error": "summary.json is not a JSON object"}

"""An attempt of a run, and how it fares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..fs import attempt_folder, attempt_of, read_from, read_json, root, size_of
from ..process import alive, boot_id
from ..secrets import Mask

if TYPE_CHECKING:
    from ..protocol import Active, State

LARGEST_SUMMARY = 1 << 20


def situation(folder: Path) -> dict[str, Any]:
    """Whether an attempt is absent, running or exited, and how it ended.

    A supervisor that was killed leaves no word of how its program ended: `lost` says that there is something left to do
    in its place. Life is looked at first and exit.json last, so that nothing which ends meanwhile seems lost.
    """
    begun = read_json(folder / "pid.json")
    if begun is None:
        return {"state": "absent"}
    same_boot = begun["boot_id"] == boot_id()
    program, supervisor = (same_boot and alive(begun[who]) for who in ("program", "supervisor"))
    ended = read_json(folder / "exit.json")
    if ended:
        lost = ended["upload"] == "pending" and not supervisor
        return {"state": "exited", **ended, "uploading": supervisor, "lost": lost}
    if supervisor:
        return {"state": "running", "started": begun["started"]}
    if program:
        return {"state": "running", "started": begun["started"], "error": "supervisor lost; the program goes on"}
    error = "supervisor lost" if same_boot else "the worker was restarted"
    return {"state": "exited", "started": begun["started"], "error": error, "lost": True}


def active() -> Active | None:
    """What is alive on this worker, None where nothing is."""
    for path in sorted(root().glob("runs/*/attempt-*/pid.json")):
        folder = path.parent
        if not (folder / "exit.json").exists() and situation(folder)["state"] == "running":
            return {"run_id": folder.parent.name, "attempt": attempt_of(folder)}
    return None


def state(run_id: str, attempt: int | None = None, tail_bytes: int = 16384) -> State:
    """How an attempt fares (by default the latest), with the end of its log and the summary that it wrote."""
    folder = attempt_folder(run_id, attempt)
    now = situation(folder)
    mask = Mask.of(folder.parent)
    size = size_of(folder / "log")
    return {
        "run_id": run_id,
        "attempt": attempt_of(folder),
        "state": now["state"],
        "code": now.get("code"),
        "signal": now.get("signal"),
        "started": now.get("started"),
        "ended": now.get("ended"),
        "error": now.get("error"),
        "oom_kills": now.get("oom_kills"),
        "free_gb": now.get("free_gb"),
        "upload": now.get("upload"),
        "upload_error": now.get("upload_error"),
        "notice": now.get("notice"),
        "log_size": size,
        "log_tail": _tail(folder / "log", size, tail_bytes, mask).decode(errors="replace"),
        "summary": _summary(folder.parent),
    }


def _tail(log: Path, size: int, tail_bytes: int, mask: Mask) -> bytes:
    """A secret at the beginning of the tail, or of which only the beginning is there, is masked too."""
    begin = max(0, size - tail_bytes)
    early = max(0, begin - mask.longest)
    data = mask.masked(read_from(log, early, size - early))
    return data[begin - early : len(data) - mask.begun(data)]


def _summary(run: Path) -> dict[str, Any] | None:
    """It is the program's file and may hold anything, or not end."""
    path = run / "summary.json"
    if size_of(path) > LARGEST_SUMMARY:
        return {"error": f"summary.json has more than {LARGEST_SUMMARY} bytes"}
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        return {"error": f"summary.json is not JSON: {error}"}
    return found if found is None or isinstance(found, dict) else {"error": "summary.json holds no JSON object"}

"""The stacks of the processes of a hung program. Nothing of HTTP is imported: the worker may be starved."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..attempts import SecretMask
from ..fs import attempt_folder, file_size, read_json, read_range
from ..worker_processes import attempt_processes, boot_id, group_members, is_alive, send_signal

if TYPE_CHECKING:
    from ..protocol import Stacks, StacksProcess

MAX_BYTES = 1 << 16
QUIET_SECONDS = 0.3


def stacks(run_id: str, attempt: int | None = None, timeout_seconds: float = 5.0) -> Stacks:
    """Request the stack traces of every process of an attempt (by default the latest).

    A process that handles SIGQUIT gets that: the bundled trainer prints its stacks and continues. Others get SIGABRT if
    they handle it, as Python does under PYTHONFAULTHANDLER, and print their stacks while they die. A process that
    handles neither gets no signal, because it would die silently. Linux only; elsewhere no process gets a signal.
    """
    folder = attempt_folder(run_id, attempt)
    begun = read_json(folder / "pid.json", "boot_id", "program")
    if not begun or begun["boot_id"] != boot_id() or not is_alive(begun["program"]):
        return {"processes": [], "text": ""}
    before = file_size(folder / "log")
    group = group_members(begun["program"]["pid"])
    found = [_request_stack(pid) for pid in sorted({*group, *attempt_processes(folder)})]
    if any(process["signal"] for process in found):
        _wait_for_output(folder / "log", before, timeout_seconds)
    text = SecretMask.for_run(folder.parent).apply(read_range(folder / "log", before, MAX_BYTES))
    return {"processes": found, "text": text.decode(errors="replace")}


def _request_stack(pid: int) -> StacksProcess:
    """Send a process the signal that it handles; return what /proc shows about it."""
    folder = Path("/proc") / str(pid)
    try:
        lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        caught = int(lines.get("SigCgt", "0").strip() or "0", 16)
        waits_in = (folder / "wchan").read_text()
    except (OSError, ValueError):
        return {"pid": pid, "name": "", "state": "", "waits_in": "", "signal": None}
    listens = [s for s in (signal.SIGQUIT, signal.SIGABRT) if caught >> (s - 1) & 1]
    state = lines.get("State", "").strip()
    if listens:
        send_signal(os.kill, pid, listens[0])
        if state.startswith("T"):
            send_signal(os.kill, pid, signal.SIGCONT)  # a stopped process handles no signal
    name = lines.get("Name", "").strip()
    return {
        "pid": pid,
        "name": name,
        "state": state,
        "waits_in": waits_in,
        "signal": listens[0].name if listens else None,
    }


def _wait_for_output(log: Path, before: int, seconds: float) -> None:
    """Wait until output was written and has gone quiet, or until the timeout."""
    end, size, quiet_since = time.monotonic() + seconds, before, time.monotonic()
    while time.monotonic() < end:
        time.sleep(0.05)
        if (now := file_size(log)) != size:
            size, quiet_since = now, time.monotonic()
        elif size > before and time.monotonic() - quiet_since > QUIET_SECONDS:
            return

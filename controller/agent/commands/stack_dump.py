"""Where a program is that does not go on: the stacks of its Python threads, in its log, before anything is ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..fs import attempt_folder, read_from, read_json, size_of
from ..process import alive, boot_id, group_of, marked, send
from ..secrets import Mask

if TYPE_CHECKING:
    from ..protocol import Stacks, StacksProcess

MOST_BYTES = 1 << 16
QUIET_SECONDS = 0.3


def stacks(run_id: str, attempt: int | None = None, timeout_seconds: float = 5.0) -> Stacks:
    """Have every process of an attempt (by default the latest) say where it is.

    SIGQUIT goes to those that listen to it: the bundled trainer then writes its stacks and goes on. The others are
    aborted if they listen to that, as every Python does under PYTHONFAULTHANDLER, and write them while they end.
    Nobody gets a signal that would end it without a word (Linux only: elsewhere nobody gets any).
    """
    folder = attempt_folder(run_id, attempt)
    begun = read_json(folder / "pid.json")
    if not begun or begun["boot_id"] != boot_id() or not alive(begun["program"]):
        return {"processes": [], "text": ""}
    before = size_of(folder / "log")
    group = group_of(begun["program"]["pid"])
    found = [_ask(pid) for pid in sorted({*group, *marked(folder)})]
    if any(process["signal"] for process in found):
        _wait(folder / "log", before, timeout_seconds)
    text = Mask.of(folder.parent).masked(read_from(folder / "log", before, MOST_BYTES))
    return {"processes": found, "text": text.decode(errors="replace")}


def _ask(pid: int) -> StacksProcess:
    """Send one process the signal that it listens to; what is known of it without its help comes back."""
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
        send(os.kill, pid, listens[0])
        if state.startswith("T"):
            send(os.kill, pid, signal.SIGCONT)  # a stopped process takes no signal
    name = lines.get("Name", "").strip()
    return {
        "pid": pid,
        "name": name,
        "state": state,
        "waits_in": waits_in,
        "signal": listens[0].name if listens else None,
    }


def _wait(log: Path, before: int, seconds: float) -> None:
    """Until something was written and nothing more comes."""
    end, size, quiet_since = time.monotonic() + seconds, before, time.monotonic()
    while time.monotonic() < end:
        time.sleep(0.05)
        if (now := size_of(log)) != size:
            size, quiet_since = now, time.monotonic()
        elif size > before and time.monotonic() - quiet_since > QUIET_SECONDS:
            return

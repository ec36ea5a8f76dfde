"""Cleanup of a worker for the next program: stale TPU locks, leftover processes of earlier attempts, huge pages."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..fs import AgentError, agent_root, locked, read_json, wait_until, write_json
from ..process import boot_id, is_alive, processes_by_attempt, processes_with_open_file, run_tool, send_signal
from ..program.state import active_attempt, attempt_status

if TYPE_CHECKING:
    from ..protocol import WorkerHygiene

THP = "kernel/mm/transparent_hugepage/enabled"
"""Sysfs path; JAX warns on TPU VMs unless it is `always` (https://docs.kernel.org/admin-guide/mm/transhuge.html)."""


def pending_cleanup() -> list[str]:
    """Return messages about what needs tidying; empty while a program runs. Reads a few small files only."""
    if active_attempt():
        return []
    found = [f"stale {libtpu_lockfile()}"] if _is_stale(libtpu_lockfile()) else []
    found += [
        f"process {pid} of {folder.parent.name}, {folder.name}" for folder, pids in _check_leftovers() for pid in pids
    ]
    if _huge_pages_mode() == "off" and _last_result_this_boot() is None:
        found.append("transparent huge pages are off")
    return found


def tidy() -> WorkerHygiene:
    """Tidy what `pending_cleanup` reports; record what this user lacks permission for, once per boot."""
    with locked("start"):
        return {"done": [], "not_done": []} if active_attempt() else tidy_locked()


def tidy_locked() -> WorkerHygiene:
    """Tidy while holding the "start" lock and with no program running."""
    done: list[str] = []
    refused: list[str] = []
    if _is_stale(libtpu_lockfile()):
        _run_as_root(["rm", "-f", str(libtpu_lockfile())], lambda: libtpu_lockfile().unlink())
        done.append(f"removed the stale {libtpu_lockfile()}")
    for folder, pids in _check_leftovers():
        _kill_leftovers(folder, pids)
        done.append(f"killed leftover processes of {folder.parent.name}, {folder.name}")
    if _huge_pages_mode() == "off" and _last_result_this_boot() is None:
        path = sysfs_root() / THP
        try:
            _run_as_root(["sh", "-c", 'echo always > "$0"', str(path)], lambda: path.write_text("always"))
            done.append("transparent huge pages: always")
        except AgentError:
            write_json(agent_root() / "tidy.json", {"boot_id": boot_id(), "huge_pages": "refused"})
            refused.append("transparent huge pages stay off: this user cannot run sudo")
    return {"done": done, "not_done": refused}


def libtpu_lockfile() -> Path:
    """Return libtpu's lock file, held while a process uses the TPU; a killed process leaves it behind."""
    return Path(os.environ.get("TMPDIR", "/tmp")) / "libtpu_lockfile"  # noqa: S108 - libtpu's own path


def _is_stale(lock: Path) -> bool:
    """Return whether a lock file is left over from a killed process.

    Another user's is not if this user cannot run sudo, because it is unknown then whether a process has it open: others
    may use an adopted pod.
    """
    if not lock.exists() or processes_with_open_file({os.path.realpath(lock)}):
        return False
    try:
        if os.getuid() not in (0, lock.stat().st_uid):
            run_tool(["sudo", "-n", "true"])
    except (AgentError, FileNotFoundError):  # no sudo; or its owner has just removed it
        return False
    return True


def _check_leftovers() -> list[tuple[Path, list[int]]]:
    """Return leftover processes of ended attempts, known from pid.json or from the attempt in their environment."""
    folders = [path.parent for path in sorted(agent_root().glob("runs/*/attempt-*/pid.json"))]
    begun = {folder: read_json(folder / "pid.json") for folder in folders}
    now = boot_id()
    here = [folder for folder in folders if begun[folder]["boot_id"] == now]
    ended = [f for f in here if (s := attempt_status(f))["state"] == "exited" and not s.get("uploading")]
    marks = processes_by_attempt(ended)
    alive_of = {f: [begun[f]["program"]["pid"]] if is_alive(begun[f]["program"]) else [] for f in ended}
    return [(f, pids) for f in ended if (pids := sorted({*alive_of[f], *marks[f]}))]


def _kill_leftovers(folder: Path, pids: list[int]) -> None:
    program = read_json(folder / "pid.json")["program"]
    if is_alive(program):
        send_signal(os.killpg, program["pid"], signal.SIGKILL)
    for pid in pids:
        send_signal(os.kill, pid, signal.SIGKILL)
    wait_until(lambda: folder not in dict(_check_leftovers()), 10.0)


def sysfs_root() -> Path:
    return Path(os.environ.get("SLIPWAY_SYSFS", "/sys"))


def _huge_pages_mode() -> str:
    """Return "on", "off", or "none" if the kernel lacks the feature."""
    try:
        text = (sysfs_root() / THP).read_text()
    except OSError:
        return "none"
    return "on" if "[always]" in text or text.strip() == "always" else "off"


def _last_result_this_boot() -> Any:
    known = read_json(agent_root() / "tidy.json")
    return known if known and known["boot_id"] == boot_id() else None


def _run_as_root(argv: list[str], directly: Any) -> None:
    """Run `directly` as this user, or else `argv` with passwordless sudo. Raises AgentError if neither is permitted."""
    try:
        directly()
    except PermissionError:
        run_tool(["sudo", "-n", *argv])

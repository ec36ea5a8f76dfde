"""Processes: liveness, ownership, signals, and running tools."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .fs import AgentError, attempt_number


def boot_id() -> str:
    """Return an ID that changes with every boot of the worker; records of another boot are void."""
    if emulated := os.environ.get("SLIPWAY_BOOT_ID"):
        return emulated
    linux = Path("/proc/sys/kernel/random/boot_id")
    return linux.read_text().strip() if linux.exists() else run_tool(["sysctl", "-n", "kern.boottime"]).strip()


def uptime_seconds() -> float:
    """Return how long this VM has been up; infinity where it is unknown."""
    try:
        if emulated := os.environ.get("SLIPWAY_BOOT_TIME"):
            return time.time() - float(emulated)
        return float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return math.inf


def wall_time() -> float:
    """Return the seconds since the epoch by this worker's clock, which may be wrong: only for people to read."""
    try:
        return time.time() + float(Path(os.environ["SLIPWAY_CLOCK"]).read_text())
    except (KeyError, OSError, ValueError):
        return time.time()


def process_ids() -> list[int]:
    """Return the ids of all processes (Linux only; empty elsewhere).

    This and its callers read /proc without pathlib, which would take most of the time of `observe`.
    """
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    except FileNotFoundError:  # macOS
        return []


def _read_proc(pid: int, name: str) -> bytes:
    """Return a file of a process; empty if it has ended in the meantime or belongs to another user."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def start_time(pid: int) -> str | None:
    """Return when the process started, in the system's own unit, or None if it is dead or a zombie.

    The pid and the start time together identify a process.
    """
    if not Path("/proc/self/stat").exists():  # macOS
        status, _, began = run_tool(["ps", "-o", "stat=,lstart=", "-p", str(pid)], check=False).strip().partition(" ")
        return None if status.startswith("Z") else began.strip() or None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def group_members(leader: int) -> dict[int, str]:
    """Return the living processes of a group with their states: R, S, D (waits for a device), T (stopped), and so on.

    Linux only; empty elsewhere.
    """
    found: dict[int, str] = {}
    for pid in process_ids():
        fields = _read_proc(pid, "stat").rpartition(b")")[2].decode().split()
        if fields and fields[2] == str(leader) and fields[0] not in "ZX":
            found[pid] = fields[0]
    return found


def oom_kills() -> int:
    """Return how many processes this kernel has OOM-killed since boot; an emulated worker keeps its own count."""
    try:
        lines = Path(os.environ.get("SLIPWAY_VMSTAT", "/proc/vmstat")).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def process_identity() -> dict[str, Any]:
    return {"pid": os.getpid(), "start_time": start_time(os.getpid())}


def is_alive(process: dict[str, Any]) -> bool:
    """Return whether the process described by `process_identity` still runs, not a later one with the same pid."""
    began = start_time(process["pid"])  # None: it is dead, and a record may say null too
    return began is not None and began == process["start_time"]


def attempt_processes(attempt: Path) -> list[int]:
    """Return the processes whose environment names this attempt, even if they left its group (Linux only)."""
    return processes_by_attempt([attempt])[attempt]


def processes_by_attempt(attempts: list[Path]) -> dict[Path, list[int]]:
    """Return `attempt_processes` of several attempts, reading each process only once because that is slow."""
    wanted = {
        a: {f"SLIPWAY_RUN_DIR={a.parent}".encode(), f"SLIPWAY_ATTEMPT={attempt_number(a)}".encode()} for a in attempts
    }
    found: dict[Path, list[int]] = {attempt: [] for attempt in attempts}
    for pid in process_ids() if attempts else ():
        content = _read_proc(pid, "environ")
        if b"SLIPWAY_ATTEMPT=" in content:
            variables = set(content.split(b"\0"))
            for attempt, marks in wanted.items():
                if marks <= variables:
                    found[attempt].append(pid)
    return found


def processes_with_open_file(paths: set[str]) -> dict[int, set[str]]:
    """Return the processes that have any of these real paths open, and which (Linux only).

    Files of another user's process take root to see: passwordless sudo, where this user has it. The other users of an
    emulated worker's machine are not on that worker.
    """
    found: dict[int, set[str]] = {}
    hidden: list[str] = []
    for pid in process_ids() if paths else ():
        folder = f"/proc/{pid}/fd"
        try:
            links = os.listdir(folder)  # noqa: PTH208
        except PermissionError:
            hidden += [folder] if command_line(pid) else []  # kernel threads have none
            continue
        except OSError:
            continue  # it has ended
        for link in links:
            try:
                target = os.readlink(f"{folder}/{link}")  # noqa: PTH115 - a Path would drop the suffix that the kernel appends
            except OSError:
                continue
            if target in paths:
                found.setdefault(pid, set()).add(target)
    if hidden and "SLIPWAY_DEV" not in os.environ:
        for pid, target in _open_files_as_root(hidden):
            if target in paths:
                found.setdefault(pid, set()).add(target)
    return found


def _open_files_as_root(folders: list[str]) -> list[tuple[int, str]]:
    """Return (pid, target) of the links in these fd folders; empty without passwordless sudo."""
    argv = ["sudo", "-n", "find", *folders, "-maxdepth", "1", "-type", "l", "-printf", "%h %l\\n"]
    try:
        lines = run_tool(argv, check=False, timeout=30.0).splitlines()  # processes that end make find fail
    except AgentError:
        return []
    pairs = [line.partition(" ")[::2] for line in lines if line.startswith("/proc/")]
    return [(int(folder.split("/")[2]), target) for folder, target in pairs]


def command_line(pid: int) -> str:
    """Return the first words of a process's command; "" if it has ended or is a kernel thread.

    Later words may be secrets.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    text = " ".join(word.decode(errors="replace") for word in words[:2] if word)
    return "".join(c if c.isprintable() else "?" for c in text)[:120]


def send_signal(kill: Callable[[int, int], None], pid: int, signum: int) -> None:
    """Call `os.kill` or `os.killpg`, ignoring processes that are already gone."""
    try:
        kill(pid, signum)
    except (ProcessLookupError, PermissionError):  # gone; macOS returns EPERM for a group of zombies
        return


def run_tool(
    argv: list[str],
    check: bool = True,
    timeout: float | None = None,
    env: dict[str, str] | None = None,
    folder: Path | None = None,
) -> str:
    """Run a program without a shell, in a folder, and return its stdout.

    Raises AgentError if the program is missing, timed out, or (with `check`) failed; the detail quotes stderr.
    """
    import subprocess

    name, nothing = Path(argv[0]).name, subprocess.DEVNULL
    try:
        done = subprocess.run(
            argv, stdin=nothing, capture_output=True, timeout=timeout, env=env, cwd=folder, check=False
        )
    except FileNotFoundError as error:
        raise AgentError(f"{argv[0]} is not installed on this worker") from error
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        raise AgentError(f"{name} did not finish within {timeout:g} s", said[-4000:]) from error
    if check and done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        last = next((line.strip() for line in reversed(said.splitlines()) if "error" in line.lower()), "")
        raise AgentError(f"{name} {argv[1]} failed with exit code {done.returncode}: {last}", said[-4000:])
    return done.stdout.decode(errors="replace")

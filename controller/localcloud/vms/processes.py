"""Finds and kills every process of a worker, by a variable in its environment."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

PROGRAM_NAMES = frozenset({"slipway", "controller"})

# Set in the environment of every session, hence inherited by everything it starts, detached or not.
MARKER = "SLIPWAY_LOCALCLOUD_WORKER"

_GIVE_UP_SECONDS = 10.0


def _machine_seconds() -> float:
    """Return seconds of this machine: its processes end in them, however late it is in the cloud."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def kill_marked(prefix: str) -> int:
    """SIGKILL all processes whose marker starts with `prefix`, and their descendants; return how many.

    Repeats until none is left, since a process may fork during the search. Blocking (tens of ms).
    Raises TimeoutError if some cannot be killed.
    """
    killed: set[int] = set()
    deadline = _machine_seconds() + _GIVE_UP_SECONDS
    while found := _find_processes(prefix):
        if _machine_seconds() > deadline:
            raise TimeoutError(f"processes {[process.pid for process in found]} do not die")
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            killed.add(process.pid)
        time.sleep(0.005)
    return len(killed)


def signal_programs(worker: str, number: int) -> int:
    """Send a signal to the programs that the agent runs on a worker, but not to the agent; return how many got it.

    Blocking (tens of ms).
    """
    struck = 0
    for process, info in _iter_processes("environ"):
        environ = info["environ"] or {}
        if environ.get(MARKER) == worker and "SLIPWAY_ATTEMPT" in environ:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
            struck += 1
    return struck


def set_disk_full(worker: str, full: bool) -> None:
    """Forbid or allow file growth for all processes of a worker, to emulate a full disk.

    Writes fail with EFBIG, because a disk cannot be full for some processes only. Blocking (tens of ms).
    """
    for process in _find_processes(worker):
        with contextlib.suppress(psutil.NoSuchProcess):
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (0 if full else hard, hard))


@dataclass(frozen=True)
class Client:
    """Local source and destination port of a request, and when it came (seconds since the epoch)."""

    port: int
    server_port: int
    time: float


def kill_client(clients: Sequence[Client]) -> int | None:
    """SIGKILL the controller that sent one of these requests, trying the last one first; return its pid, or None.

    A port may belong to another process by now. Therefore the process must have a connection to the emulator from
    that port, be older than the request, and run Slipway. Blocking (tens of ms).
    """
    holders = {
        (c.laddr.port, c.raddr.port): c.pid for c in psutil.net_connections("tcp") if c.pid and c.laddr and c.raddr
    }
    for client in reversed(clients):
        pid = holders.get((client.port, client.server_port))
        if pid is None or pid == os.getpid():
            continue
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            if process.create_time() <= client.time and runs_slipway(process.cmdline()):
                process.kill()
                return pid
    return None


def runs_slipway(argv: Sequence[str]) -> bool:
    """Return whether a command line is that of Slipway: `python -m controller`, or the installed command."""
    words = argv[:4]
    as_module = any(pair[0] == "-m" and pair[1] in PROGRAM_NAMES for pair in itertools.pairwise(words))
    return as_module or any(os.path.basename(word) in PROGRAM_NAMES for word in words[:2])  # noqa: PTH119


def wait_ended(process: psutil.Process, seconds: float) -> bool:
    """Return whether a process ends in time. A zombie counts as ended: its parent may be slow to reap it, or gone."""
    deadline = _machine_seconds() + seconds
    while _machine_seconds() < deadline:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.005)
    return False


def _find_processes(prefix: str) -> list[psutil.Process]:
    """Return the marked processes and their descendants, which may have another environment."""
    processes = {process.pid: (process, info) for process, info in _iter_processes("ppid", "status", "environ")}
    # Another user's environment reads as None, hence is not marked.
    ours = {
        pid
        for pid, (_, info) in processes.items()
        if pid != os.getpid() and (info["environ"] or {}).get(MARKER, "").startswith(prefix)
    }
    while more := {pid for pid, (_, info) in processes.items() if info["ppid"] in ours} - ours:
        ours |= more
    return [
        process for pid, (process, info) in processes.items() if pid in ours and info["status"] != psutil.STATUS_ZOMBIE
    ]


def _iter_processes(*attributes: str) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    """Replace `psutil.process_iter`, whose processes are shared between threads; yields None where not accessible."""
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
            answers = process.as_dict(attributes)
        except psutil.NoSuchProcess:
            continue
        yield process, answers

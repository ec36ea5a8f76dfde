"""Finds and kills every process of a worker, by a variable in its environment."""

from __future__ import annotations

import os
import time

import psutil

# Set in the environment of every session and so inherited by whatever it starts, detached or not.
MARKER = "SLIPWAY_LOCALCLOUD_WORKER"

_GIVE_UP_SECONDS = 10.0


def kill_marked(prefix: str) -> int:
    """SIGKILLs all processes whose marker starts with `prefix`, and their descendants. Returns how many.

    Looks again until none is left, since a process may fork while it is being looked for. Blocking (tens of ms).
    Raises TimeoutError if some cannot be killed.
    """
    killed: set[tuple[int, float]] = set()
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while found := _find(prefix):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[process.pid for process in found]} do not die")
        for process in found:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
            killed.add((process.pid, process.create_time() if process.is_running() else 0.0))
        psutil.wait_procs(found, timeout=0.2)
    return len(killed)


def _find(prefix: str) -> list[psutil.Process]:
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARKER, "").startswith(prefix):
                # A descendant may have been started with another environment.
                for one in (process, *process.children(recursive=True)):
                    if one.status() != psutil.STATUS_ZOMBIE:
                        found[one.pid] = one
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone meanwhile, or another user's: not ours
    return list(found.values())

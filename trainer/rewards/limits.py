"""How long a check may take. The kernel ends the process that oversteps, wherever it is, in C code as well."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator

MAX_MEMORY_BYTES = 4 << 30
"""Bytes of data that a worker may have."""
WALL_LIMIT_SECONDS = 30
"""What a check may wait beyond ten times its CPU time: this limit is for those that sleep, and not deterministic."""


def install_limits() -> None:
    """Make this process one that the limits can end, quietly."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for told in (signal.SIGINT, signal.SIGTERM):  # for the trainer to answer; when it ends, the pipe is closed
        signal.signal(told, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


@contextlib.contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """At most that much CPU time, of all threads together: how busy the machine is does not matter."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds + WALL_LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def uncounted_cpu_time() -> Iterator[None]:
    """For imports: what happens once per process must not be charged to the check that comes first."""
    left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_PROF, left)


def is_timeout(code: int) -> bool:
    """Does a process that ended with this code of `Popen` owe it to a limit?"""
    return code in (-signal.SIGPROF, -signal.SIGALRM)

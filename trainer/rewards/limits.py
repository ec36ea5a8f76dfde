"""Time limits of checks. The kernel kills a process that exceeds them, even inside C code."""

import contextlib
import resource
import signal
from collections.abc import Iterator

MAX_MEMORY_BYTES = 4 << 30
"""Maximum bytes of data of a worker."""
WALL_LIMIT_SECONDS = 30
"""Wall-clock limit beyond ten times the CPU time; only for checks that sleep, since it is not deterministic."""


def install_limits(memory: int = MAX_MEMORY_BYTES) -> None:
    """Prepare this process to be killed quietly by the limits. memory: maximum bytes of data."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    for told in (signal.SIGINT, signal.SIGTERM):  # handled by the trainer; when it exits, the pipe closes
        signal.signal(told, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


@contextlib.contextmanager
def cpu_time_limit(seconds: float, wall: float | None = None) -> Iterator[None]:
    """Limit the CPU time of all threads together, so that machine load does not matter.

    wall: limit of wall-clock seconds; None for ten times the CPU time and WALL_LIMIT_SECONDS.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds + WALL_LIMIT_SECONDS if wall is None else wall)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def uncounted_cpu_time() -> Iterator[None]:
    """Exclude imports from the limit, so the first check is not charged for once-per-process work."""
    left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_PROF, left)


@contextlib.contextmanager
def file_size_limit(most: int) -> Iterator[None]:
    """Limit the bytes of every file that is written; the kernel kills a process that writes more."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

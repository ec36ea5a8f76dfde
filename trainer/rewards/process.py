"""A worker process that answers one line of JSON with another, until a limit of the kernel ends it.

The kernel kills a process that exceeds its limits, even inside C code.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

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


class TimeLimitError(Exception):
    """The process used up its time."""


class OutputLimitError(Exception):
    """The process wrote too much."""


class ProcessDiedError(Exception):
    """The process ended during a request, for another reason."""


class WorkerProcess:
    """One process, started when needed, and restarted after it dies."""

    def __init__(self, module: str, *arguments: str) -> None:
        """Take the words of `python -m module arguments`."""
        self._words: Sequence[str] = ("-m", module, *arguments)
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: Any) -> Any:
        """Return the answer. Raises TimeLimitError, OutputLimitError or ProcessDiedError if the process dies.

        One that dies for another reason than a limit is asked once more: perhaps this request was not at fault.
        """
        try:
            return self._ask_once(request)
        except ProcessDiedError:
            return self._ask_once(request)

    def _ask_once(self, request: Any) -> Any:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request, default=str) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply.endswith("\n"):
            self._raise_exit_error(process)
        return json.loads(reply)

    def stop(self) -> None:
        """End the process, after its current request."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        # the order of SymPy's sets must not differ between processes
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
        env = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
            encoding="utf-8",
            process_group=0,
        )
        return self._process

    def _raise_exit_error(self, process: subprocess.Popen[str]) -> NoReturn:
        assert process.stdout is not None
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        process.stdout.close()
        try:
            assert process.stdin is not None
            process.stdin.close()
        except BrokenPipeError:
            pass  # what it was not there to read
        self._process = None
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            raise TimeLimitError
        if code == -signal.SIGXFSZ:
            raise OutputLimitError
        raise ProcessDiedError(f"its process ended with code {code}")

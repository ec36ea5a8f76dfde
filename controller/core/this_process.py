"""This process: its state folder; its injectable clock, so that tests need not wait; its memory; its own programs.

`own_program("controller.localcloud", "start")` is a command line. `python -m` would not find Slipway's programs,
because an installed Slipway is not on `sys.path`. Run as a file, this module puts Slipway's packages first, so none of
the current folder or of site-packages is taken for them.
"""

import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
DISTRIBUTION = "slipway-tpu"
"""Name of the installed package: `slipway` on PyPI is another project, with a command of the same name."""
LOOK_SECONDS = 0.5
"""How soon a wait for something else than time notices that it is to end."""
TOLERANCE_SECONDS = 10.0
"""How much a clock may differ from a server's: its answers have whole seconds, and take some to arrive."""


def state_home_name() -> str:
    """Return how the environment names the folder of what this machine remembers; an empty variable is none."""
    return os.environ.get("SLIPWAY_HOME") or "~/.slipway"


def state_home() -> Path:
    """Return the folder of what this machine remembers.

    Raises ConfigError if it is in the home of a user whom this machine does not have.
    """
    named = state_home_name()
    try:
        return Path(named).expanduser()
    except RuntimeError:
        from controller.core.errors import ConfigError  # run as a file, this module has no packages yet

        user = named.partition("/")[0].removeprefix("~")
        raise ConfigError(f"SLIPWAY_HOME: this machine has no user {user!r}; write the path in full") from None


class InterruptedSleepError(BaseException):
    """Stop requested while this thread slept. Not an Exception, so that no handler swallows it."""


def boot_time() -> float:
    """Return monotonic seconds that include the time in which this machine slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # macOS has only the latter


def boot_id() -> str:
    """Return what names this boot of this machine; "" where the system does not tell."""
    linux = Path("/proc/sys/kernel/random/boot_id")
    return linux.read_text().strip() if linux.exists() else ""


class Clock:
    """Time of day, and a sleep that ends at once when `interrupt` is called.

    The time of day goes on with the boot's clock, so nothing moves when somebody sets that of this machine. Google's
    answers correct it: limits count from times that Google, or a controller on another machine, has written.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._booted = time.time() - boot_time()
        self.was_ahead = 0.0
        """Seconds by which this machine's time of day was ahead, as far as it has been corrected."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        return self._booted + boot_time()

    def correct(self, date: float) -> None:
        """Go by the time of day that a server has told a moment ago, in whole seconds, if ours is another one."""
        if abs(ahead := self.now() - date) > TOLERANCE_SECONDS:
            self._booted -= ahead
            self.was_ahead += ahead

    def monotonic(self) -> float:
        """Return monotonic seconds for durations, unaffected by clock changes and stopped while the machine sleeps."""
        return time.monotonic()

    def boot_time(self) -> float:
        """Return monotonic seconds that include the time in which this machine slept."""
        return boot_time()

    def sleep(self, seconds: float) -> None:
        """Sleep. Raises InterruptedSleepError if `interrupt` was called before or during the sleep."""
        if self._stop.wait(seconds):
            raise InterruptedSleepError

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait in the background until the event, at most so long; return whether it has come."""
        return event.wait(seconds)

    def raise_if_interrupted(self) -> None:
        """Raise InterruptedSleepError if `interrupt` was called; for callers that wait by other means than `sleep`."""
        if self._stop.is_set():
            raise InterruptedSleepError

    def interrupt(self) -> None:
        self._stop.set()

    def await_answer(self, ask: Callable[[], T]) -> T:
        """Return the answer of a function that only waits, for minutes; it is left alone if `interrupt` is called.

        Raises InterruptedSleepError as `sleep` does.
        """
        from concurrent.futures import Future, wait  # nothing that `slipway --help` needs

        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(ask())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True, name="await_answer").start()
        while not wait([answer], LOOK_SECONDS).done:
            self.raise_if_interrupted()
        return answer.result()

    def deadline(self, seconds: float) -> Callable[[], bool]:
        """Return a function that says whether that many seconds have passed."""
        end = self.monotonic() + seconds
        return lambda: self.monotonic() >= end


def iso_timestamp(seconds: float) -> str:
    """Format a time as RFC 3339 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


INTERVAL_SECONDS = 60.0


class FreedMemory:
    """Returns freed memory to the system once a minute; does nothing where the C library is not glibc.

    glibc has several heaps for each core, from which threads allocate, and keeps what is freed in them. With three
    threads for each of 64 workers a controller grew by 0.9 MB a minute, though it used no more.
    https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    """

    def __init__(self, clock: Clock) -> None:
        import ctypes

        self._clock, self._trim = clock, getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
        self._is_due = clock.deadline(INTERVAL_SECONDS)

    def return_if_due(self) -> None:
        """Return it if a minute has passed since the last time. Call it often."""
        if self._is_due():
            self._is_due = self._clock.deadline(INTERVAL_SECONDS)
            self._trim(0)


ROOT = Path(__file__).resolve().parents[2]


def own_program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of Slipway as `python -m` would."""
    return [sys.executable, "-P", __file__, module, *arguments]


def run_program(module: str, *arguments: str, modules: Sequence[str] = (), imports: Sequence[str] | None = None) -> int:
    """Run a module with the terminal of this process, and return its exit code.

    Args:
        module: of Slipway.
        arguments: its command line.
        modules: folders that it can import from, relative to the current one.
        imports: `module:name` of all that it may import of what a config names; None: everything.
    """
    import subprocess

    from conf.formats import IMPORTS_VARIABLE  # this file is also a program, which finds it later

    places = [*(str(Path.cwd() / name) for name in modules), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    if imports is not None:
        environment[IMPORTS_VARIABLE] = ",".join(imports)
    return subprocess.run(own_program(module, *arguments), env=environment, check=False).returncode


def main() -> None:
    del sys.argv[0]
    sys.path.insert(0, str(ROOT))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

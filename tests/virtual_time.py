"""One time for the cloud and the controllers of a test: it goes on as real time does, and waits shorten themselves.

A controller's sleep moves the time on for everybody. It takes a small part of its length, so that what really runs
(pods, programs, SSH) keeps up; a wait of minutes for Google takes a second, and both sides agree how late it is.
`python -m tests.virtual_time VERB …` is `slipway` in this time, or in real time unless `VARIABLE` names its file.
"""

import fcntl
import mmap
import os
import selectors
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from controller.core.this_process import Clock

T = TypeVar("T")
VARIABLE = "SLIPWAY_TESTS_TIME"
"""Environment variable with the file that the processes of a test share."""
IN_VIRTUAL_TIME = (sys.executable, "-m", "tests.virtual_time")
"""Command line of `slipway` as a process in the time of this one; it needs the repository on its PYTHONPATH."""
SPEED = 20.0
"""A sleep takes so many times less than it says."""
LOOK_SECONDS = 0.01
"""How soon, in real seconds, a process sees that another one has moved the time on."""


class SharedTime:
    """Seconds that have been skipped, in a file that all processes of a test map."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(self._file).st_size < 8:
            os.ftruncate(self._file, 8)
        self._map = mmap.mmap(self._file, 8)
        self._lock = threading.Lock()

    @property
    def skipped(self) -> float:
        return struct.unpack("d", self._map[:])[0]

    def skip(self, seconds: float) -> None:
        self.skip_to(_monotonic() + self.skipped + seconds)

    def skip_to(self, moment: float) -> None:
        """Make it as late as that, in seconds of this machine's monotonic clock and those skipped; never earlier."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                self._map[:] = struct.pack("d", max(self.skipped, moment - _monotonic()))
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


_monotonic, _time = time.monotonic, time.time


class VirtualClock(Clock):
    """Sleeps little, and it is as late afterwards as if it had slept; other waits last until it is late enough."""

    def __init__(self, shared: SharedTime) -> None:
        super().__init__()
        self._shared = shared

    def now(self) -> float:
        return super().now() + self._shared.skipped

    def monotonic(self) -> float:
        return _monotonic() + self._shared.skipped

    def boot_time(self) -> float:
        return super().boot_time() + self._shared.skipped

    def sleep(self, seconds: float) -> None:
        end, really = self.monotonic() + seconds, _monotonic() + seconds / SPEED
        self.raise_if_interrupted()
        while self.monotonic() < end:
            if (left := really - _monotonic()) <= 0:
                self._shared.skip_to(end)
            elif self._stop.wait(min(left, LOOK_SECONDS)):
                break
        self.raise_if_interrupted()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        end = self.monotonic() + seconds
        while not event.is_set() and (left := end - self.monotonic()) > 0:
            event.wait(min(left, LOOK_SECONDS))
        return event.is_set()

    def await_answer(self, ask: Callable[[], T]) -> T:
        """A request that only waits for Google moves the time on as well."""
        answered = threading.Event()

        def hurry() -> None:
            while not answered.wait(LOOK_SECONDS):
                self._shared.skip_to(self.monotonic() + LOOK_SECONDS * SPEED)

        threading.Thread(target=hurry, daemon=True, name="hurry").start()
        try:
            return super().await_answer(ask)
        finally:
            answered.set()


class _Selector(selectors.DefaultSelector):
    """Looks up often, since somebody may have moved the time on."""

    def select(self, timeout: float | None = None) -> Any:
        return super().select(timeout if timeout is None else min(timeout, LOOK_SECONDS))


def live_in(shared: SharedTime) -> None:
    """Make this process, an emulated cloud, live in that time until it ends; its event loop is yet to be made."""
    time.time = lambda: _time() + shared.skipped
    time.monotonic = lambda: _monotonic() + shared.skipped
    selectors.DefaultSelector = _Selector  # of every event loop


@contextmanager
def virtual_time(file: Path) -> Iterator[SharedTime]:
    """While this lasts, controllers of this process, and clouds that it starts, share the time of that file."""
    shared = SharedTime(file)
    with (
        mock.patch.dict(os.environ, {VARIABLE: str(file)}),
        mock.patch("controller.connect.Clock", partial(VirtualClock, shared)),
    ):
        yield shared


def main() -> int:
    from controller.__main__ import main as slipway

    file = os.environ.get(VARIABLE)
    with virtual_time(Path(file)) if file else nullcontext():
        return slipway()


if __name__ == "__main__":
    sys.exit(main())

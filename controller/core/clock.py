"""Time as a thing that is handed in, so that tests need not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime


class InterruptedSleepError(BaseException):
    """Someone asked to stop while this thread slept. Not an Exception: nothing on the way may swallow it."""


class Clock:
    """Wall time, and a sleep that ends at once when `interrupt` is called."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def steady(self) -> float:
        """Seconds since some moment: for how long things take. It does not jump when somebody sets the clock, and it
        stands still while the machine sleeps."""
        return time.monotonic()

    def boot_time(self) -> float:
        """The same, with the time in which this machine slept."""
        return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # macOS has but the latter

    def sleep(self, seconds: float) -> None:
        """Sleep.

        Raises:
            Interrupted: when `interrupt` was called before or meanwhile.
        """
        if self._stop.wait(seconds):
            raise InterruptedSleepError

    def check(self) -> None:
        """Raises Interrupted if `interrupt` was called; for whoever waits by other means than `sleep`."""
        if self._stop.is_set():
            raise InterruptedSleepError

    def interrupt(self) -> None:
        self._stop.set()

    def deadline(self, seconds: float) -> Callable[[], bool]:
        """A function that says whether that many seconds have passed."""
        end = self.steady() + seconds
        return lambda: self.steady() >= end


def iso_timestamp(seconds: float) -> str:
    """RFC 3339 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

"""Injectable clock, so that tests need not wait."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime


class InterruptedSleepError(BaseException):
    """Stop requested while this thread slept. Not an Exception, so that no handler swallows it."""


class Clock:
    """Wall time, and a sleep that ends at once when `interrupt` is called."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def now(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return monotonic seconds for durations, unaffected by clock changes and stopped while the machine sleeps."""
        return time.monotonic()

    def boot_time(self) -> float:
        """Return monotonic seconds that include the time in which this machine slept."""
        return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # macOS has only the latter

    def sleep(self, seconds: float) -> None:
        """Sleep. Raises InterruptedSleepError if `interrupt` was called before or during the sleep."""
        if self._stop.wait(seconds):
            raise InterruptedSleepError

    def raise_if_interrupted(self) -> None:
        """Raise InterruptedSleepError if `interrupt` was called; for callers that wait by other means than `sleep`."""
        if self._stop.is_set():
            raise InterruptedSleepError

    def interrupt(self) -> None:
        self._stop.set()

    def deadline(self, seconds: float) -> Callable[[], bool]:
        """Return a function that says whether that many seconds have passed."""
        end = self.monotonic() + seconds
        return lambda: self.monotonic() >= end


def iso_timestamp(seconds: float) -> str:
    """Format a time as RFC 3339 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

"""Memory that the process has freed and the C library keeps."""

import ctypes

from controller.core.clock import Clock

INTERVAL_SECONDS = 60.0


class FreedMemory:
    """Returns freed memory to the system once a minute; does nothing where the C library is not glibc.

    glibc has several heaps for each core, from which threads allocate, and keeps what is freed in them. With three
    threads for each of 64 workers a controller grew by 0.9 MB a minute, though it used no more.
    https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._trim = clock, getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
        self._is_due = clock.deadline(INTERVAL_SECONDS)

    def return_if_due(self) -> None:
        """Return it if a minute has passed since the last time. Call it often."""
        if self._is_due():
            self._is_due = self._clock.deadline(INTERVAL_SECONDS)
            self._trim(0)

"""Poll Google for the state of the pod in a thread of its own, so that a slow API delays nothing else."""

import threading
from collections.abc import Callable

from controller.core.clock import Clock, InterruptedSleepError
from controller.core.errors import SlipwayError
from controller.gcp.errors import GoogleError
from controller.resources.pod.provisioner import PodStatus

STALE_SECONDS = 15.0
"""Age at which Google's answer is stale (three polls if those take longer)."""


class PodWatch:
    """Latest answer of Google about a pod, and its time."""

    def __init__(self, look: Callable[[], PodStatus], clock: Clock, poll_seconds: float) -> None:
        self._fetch, self._clock, self._poll_seconds = look, clock, poll_seconds
        self._stale_seconds = max(STALE_SECONDS, 3 * poll_seconds)
        self._wake, self._closed = threading.Event(), threading.Event()
        self._status: PodStatus | None = None
        self._asked_at = self._answered_at = 0.0
        self.api_up_since = clock.monotonic()
        """Time since which the API has answered without a gap."""
        self.error: BaseException | None = None
        """Permanent error, such as a missing permission."""
        threading.Thread(target=self._watch, daemon=True, name="pod-watch").start()

    def latest(self) -> PodStatus | None:
        """Return the latest answer, or None if it is stale."""
        return self._status if self._clock.monotonic() - self._answered_at <= self._stale_seconds else None

    def is_newer_than(self, time: float) -> bool:
        """Return whether the latest answer was requested after that time; if not, request one immediately."""
        if self._asked_at <= time:
            self._wake.set()
        return self._asked_at > time

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            asked = self._clock.monotonic()
            try:
                current = self._fetch()
            except InterruptedSleepError:
                return
            except GoogleError as error:
                if not error.is_transient:
                    self.error = error
                    return
            except SlipwayError as error:
                self.error = error
                return
            else:
                now = self._clock.monotonic()
                if now - self._answered_at > self._stale_seconds:
                    self.api_up_since = now
                self._status, self._asked_at, self._answered_at = current, asked, now
            self._wake.wait(self._poll_seconds)

"""Asks Google about the pod now and then, in a thread of its own: a slow API delays nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable

from controller.core.clock import Clock, InterruptedSleepError
from controller.core.errors import SlipwayError
from controller.gcp.client import GoogleError
from controller.resources.pod.provisioner import PodStatus

STALE_SECONDS = 15.0
"""What Google said so long ago (three polls, if they are rarer) is not known any more."""


class PodWatch:
    """What Google said last of a pod, and when."""

    def __init__(self, look: Callable[[], PodStatus], clock: Clock, poll_seconds: float) -> None:
        self._look, self._clock, self._poll_seconds = look, clock, poll_seconds
        self._stale_seconds = max(STALE_SECONDS, 3 * poll_seconds)
        self._wake, self._closed = threading.Event(), threading.Event()
        self._seen: PodStatus | None = None
        self._asked = self._answered = 0.0
        self.since = clock.steady()
        """Since when the API has been answering without a gap."""
        self.error: BaseException | None = None
        """What no later answer will mend: we may not look, say."""
        threading.Thread(target=self._watch, daemon=True, name="pod-watch").start()

    def now(self) -> PodStatus | None:
        """The newest answer; None where there is none that is new enough."""
        return self._seen if self._clock.steady() - self._answered <= self._stale_seconds else None

    def is_newer_than(self, time: float) -> bool:
        """Was the newest answer asked for after that time? If not, it is asked for at once."""
        if self._asked <= time:
            self._wake.set()
        return self._asked > time

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            asked = self._clock.steady()
            try:
                seen = self._look()
            except InterruptedSleepError:
                return
            except GoogleError as error:
                if not error.passes:
                    self.error = error
                    return
            except SlipwayError as error:
                self.error = error
                return
            else:
                now = self._clock.steady()
                if now - self._answered > self._stale_seconds:
                    self.since = now
                self._seen, self._asked, self._answered = seen, asked, now
            self._wake.wait(self._poll_seconds)

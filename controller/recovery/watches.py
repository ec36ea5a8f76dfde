"""Watch a run from the side: Google's state of the pod, and the logs of all workers for tracebacks."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from controller.core.clock import Clock, InterruptedSleepError
from controller.core.errors import SlipwayError
from controller.gcp.errors import GoogleError
from controller.recovery.tracebacks import HEADER, Traceback, last_traceback
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


KEPT_CHARACTERS = 1 << 15
"""Length of the end of each log that is kept."""
MAX_SHOWN = 3
"""Maximum number of tracebacks shown per attempt; all workers may raise the same exception."""
SILENT_SECONDS = 20.0
"""Silence after a traceback that suggests that the program has ended in all but name."""


@dataclass
class _Log:
    """End of one worker's log; positions count from the start of the stream."""

    text: str = ""
    begin: int = 0
    heard: float = 0.0
    seen: int = -1
    """Position of the latest traceback that was reported."""
    named: int = -1
    """Position of the latest traceback after which the worker was reported as silent."""

    def position(self) -> int:
        return self.begin + self.text.rfind(HEADER)


class TracebackWatch:
    """Finds new tracebacks, and workers that have been silent since one."""

    def __init__(self) -> None:
        self._logs: dict[int, _Log] = {}
        self._shown: set[str] = set()

    def record(self, worker: int, text: str, now: float) -> Traceback | None:
        """Add log output; return a traceback that it completes, unless its like was returned before.

        An exception that only reports a lost peer is left out: its cause is on another worker.
        """
        log = self._logs.setdefault(worker, _Log())
        log.text, log.heard = log.text + text, now
        log.begin += max(0, len(log.text) - KEPT_CHARACTERS)
        log.text = log.text[-KEPT_CHARACTERS:]
        found = last_traceback(log.text)
        if found is None or not found.text.endswith("\n") or log.position() == log.seen:
            return None
        log.seen = log.position()
        if found.is_peer_loss or found.message in self._shown or len(self._shown) >= MAX_SHOWN:
            return None
        self._shown.add(found.message)
        return found

    def thread_exception(self, worker: int) -> str:
        """Return the exception that ended a thread, if it is the last thing in the worker's log; otherwise empty."""
        log = self._logs.get(worker)
        found = last_traceback(log.text) if log is not None and log.seen >= 0 else None
        return found.message if found and found.ended_thread and found.is_final and not found.is_peer_loss else ""

    def newly_silent(self, now: float) -> list[tuple[int, Traceback]]:
        """Return the workers whose log ends in a traceback and has not grown for a while; each once per traceback."""
        found = []
        for worker, log in self._logs.items():
            if log.seen < 0 or log.named == log.seen or now - log.heard < SILENT_SECONDS:
                continue
            log.named = log.seen
            last = last_traceback(log.text)
            if last is not None and last.is_final and not last.is_peer_loss:
                found.append((worker, last))
        return found

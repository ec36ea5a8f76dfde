"""Watch the logs of all workers for Python tracebacks while the program runs.

Only worker 0's output is shown live; the exception that matters may be on another worker.
"""

from dataclasses import dataclass

from controller.recovery.tracebacks import HEADER, Traceback, last_traceback

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

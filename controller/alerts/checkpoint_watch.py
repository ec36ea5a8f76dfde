"""Ask the bucket for the newest checkpoint in a thread of its own, so that a slow answer delays nothing else."""

import threading
from collections.abc import Callable

from controller.core.clock import InterruptedSleepError
from controller.core.errors import SlipwayError

POLL_SECONDS = 60.0


class CheckpointWatch:
    """The newest checkpoint, looked for once a minute."""

    def __init__(
        self,
        look: Callable[[], tuple[int, float] | None],
        step: Callable[[], float],
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Start to watch.

        Args:
            look: returns step and time of the newest checkpoint, or None if there is none.
            step: returns the last step that the program has reported.
            poll_seconds: time between two questions.
        """
        self._look, self._step, self._poll_seconds = look, step, poll_seconds
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._found: tuple[tuple[int, float] | None, float] | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True, name="checkpoint-watch")
        self._thread.start()

    def pop(self) -> tuple[tuple[int, float] | None, float] | None:
        """Return the newest checkpoint and the step of the program when the bucket was asked; None without news."""
        with self._lock:
            found, self._found = self._found, None
        return found

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_seconds):
            step = self._step()
            try:
                newest = self._look()
            except InterruptedSleepError:
                return
            except SlipwayError:
                continue  # unknown; whoever needs the bucket to go on reports that it does not answer
            with self._lock:
                self._found = newest, step

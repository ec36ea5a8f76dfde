"""A spinner with what is being done, for waits before a run's own screen opens. Only on a terminal."""

import sys
import time
from threading import Lock, Timer
from types import TracebackType
from typing import Any, Self

from controller.core.layout import shorten
from controller.core.printable import printable, unsanitized_stream

DELAY_SECONDS = 0.7
"""What is done sooner needs no spinner, and no import of rich."""
QUIET_SECONDS = 3.0
"""After so long without news, a spinner shows how long."""


class Spinner:
    """Context manager that is called with what is being done; it draws on stderr, and erases itself at the end."""

    def __init__(self, *, quiet: bool = False, delay: float = DELAY_SECONDS) -> None:
        self._stream = unsanitized_stream(sys.stderr)
        self._timer = None if quiet or not self._stream.isatty() else Timer(delay, self._open)
        self._lock = Lock()
        self._text, self._since = "", time.monotonic()
        self._live: Any = None
        self._ended = False

    def __enter__(self) -> Self:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __call__(self, text: str) -> None:
        self._text, self._since = text, time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._live is not None:
                self._live.stop()

    def _line(self, width: int) -> str:
        """Return what is being done, and for how many seconds once that is long."""
        seconds = time.monotonic() - self._since
        waited = f"  {seconds:.0f} s" if seconds >= QUIET_SECONDS else ""
        return f"{shorten(printable(self._text), width - 4 - len(waited))} …{waited}"

    def _open(self) -> None:
        """Begin to draw; runs in the timer's thread. What the main thread prints appears above the spinner."""
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner as Dots
        from rich.text import Text

        console = Console(file=self._stream, highlight=False)
        dots = Dots("dots", style="cyan")

        def draw() -> Dots:
            dots.update(text=Text(self._line(console.width)))
            return dots

        with self._lock:
            if not self._ended:
                self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=draw)
                self._live.start()

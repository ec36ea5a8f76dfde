"""What a terminal shows of work: a spinner before a run's own screen opens, then the colored progress of the run."""

import sys
import time
from collections.abc import Sequence
from threading import Lock, Timer
from types import TracebackType
from typing import Any, Self

from controller.core.text import printable, shorten, unsanitized_stream, width_of, wrap
from controller.plan.build import Plan
from controller.run.text_screen import TextScreen

DELAY_SECONDS = 0.7
"""What is done sooner needs no spinner, and no import of rich."""
QUIET_SECONDS = 3.0
"""After so long without news, a spinner shows how long."""
SPINNER_WIDTH = 12
"""Columns of a spinner, its spaces and its seconds."""


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


class View(TextScreen):
    """Event listener that draws the progress; use it as a context manager."""

    def __init__(self, plan: Plan, *, json_lines: bool, discards: bool = False) -> None:
        from rich.console import Console

        super().__init__(plan, json_lines=json_lines, discards=discards)
        stream = unsanitized_stream(sys.stderr if json_lines else sys.stdout)
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live: Any = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._json:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, transient=True, get_renderable=self._moving)
            self._live.__enter__()
            self._redraws = True
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)
        if self._live is not None:
            self._live.__exit__(kind, value, trace)
            self._live, self._redraws = None, False

    def _moving(self) -> Any:
        """Draw what is under way; a spinner shows the seconds of a wait, so that none looks like a hang."""
        from rich.console import Group
        from rich.spinner import Spinner
        from rich.text import Text

        now = time.time() + self._ahead
        room = self._console.width - SPINNER_WIDTH
        steps = [
            Spinner("dots", Text(f" {shorten(printable(title), room)}  {now - began:.0f} s"), style="cyan")
            for began, title in self._under_way.values()
        ]
        last = printable(self._training or self._last_log_line).expandtabs()
        quiet = now - self._last_news
        if quiet < QUIET_SECONDS or (self._under_way and not last):
            return Group(*steps, *([Text(f"  {shorten(last, room)}")] if last else []))
        waiting = last or ("waiting for the program's output" if self._launched else "working")
        return Group(*steps, Spinner("dots", Text(f"{shorten(waiting, room)}  {quiet:.0f} s"), style="cyan"))

    def _print(self, *parts: str | tuple[str, str], indent: int | None = None) -> None:
        from rich.text import Text

        styled = (printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts)
        line = Text.assemble(*styled)
        width = width_of(self._stream)
        if indent is None or width is None or line.cell_len <= width:
            self._console.print(line)
            return
        wrapped = Text(wrap(line.plain, width, indent))
        for span in line.spans:  # only the first words of a line have a style
            wrapped.stylize(span.style, span.start, span.end)
        self._console.print(wrapped)

    def _print_output(self, lines: Sequence[str]) -> None:
        """Print lines at once: by itself each would cost a hundred times as much, and a program may print millions."""
        from rich.text import Text

        text = "\n".join(f"    {printable(line)}" for line in lines)
        if lines and self._console.is_terminal:
            self._console.print(Text(text, "dim"))
        elif lines:
            self._console.file.write(f"{text}\n")
            self._console.file.flush()

    def _read(self, prompt: str) -> str:
        if self._live is not None:
            self._live.stop()
        answer = self._console.input(printable(prompt), markup=False)  # "[y/N]" is not markup
        self._last_news = time.time() + self._ahead
        if self._live is not None:
            self._live.start()
        return answer

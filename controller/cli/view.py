"""Colored progress of a run; on a terminal, the active steps and the training line are redrawn in place."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from controller.core.printable import printable, unsanitized_stream
from controller.plan.build import Plan
from controller.run.text_screen import TextScreen


class View(TextScreen):
    """Event listener that draws the progress; use it as a context manager."""

    def __init__(self, plan: Plan, *, json_lines: bool) -> None:
        from rich.console import Console

        super().__init__(plan, json_lines=json_lines)
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
        if self._live is not None:
            self._live.__exit__(kind, value, trace)
            self._live, self._redraws = None, False

    def _moving(self) -> Any:
        from rich.console import Group
        from rich.spinner import Spinner
        from rich.text import Text

        now = time.time()
        steps = [
            Spinner("dots", Text(printable(f" {title}  {now - began:.0f} s"), style="cyan"), style="cyan")
            for began, title in self._under_way.values()
        ]
        last = self._training or self._last_log_line
        return Group(*steps, *([Text(printable(f"  {last}"), overflow="ellipsis", no_wrap=True)] if last else []))

    def _print(self, *parts: str | tuple[str, str]) -> None:
        from rich.text import Text

        styled = (printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts)
        self._console.print(Text.assemble(*styled))

    def _read(self, prompt: str) -> str:
        if self._live is not None:
            self._live.stop()
        answer = self._console.input(printable(prompt), markup=False)  # "[y/N]" is not markup
        if self._live is not None:
            self._live.start()
        return answer

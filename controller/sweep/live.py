"""Live view of a sweep: redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from controller.core.clock import Clock
from controller.core.printable import printable, unsanitized_stream
from controller.sweep.board import HEADER, Board, BoardRow, format_counts, format_row, format_table

if TYPE_CHECKING:
    from rich.console import Console

STATE_ORDER = ("running", "failed", "ended early", "waiting", "finished")
"""Display order by state if there is no room for every run."""
MIN_ROWS = 4
"""Lines of the terminal reserved for the header, the totals and the shell prompt."""
STYLES = {"running": "cyan", "failed": "red", "finished": "green", "ended early": "yellow", "waiting": "dim"}


@contextmanager
def live_board(board: Board, clock: Clock) -> Iterator[None]:
    """Keep the board at the bottom of the terminal with messages above it; print it a last time at the end."""
    if board.json_lines or not sys.stdout.isatty():
        yield
        return
    with redrawing(lambda height: render_board(board.rows(), clock.now(), height)) as console:
        before, board.out = board.out, lambda text: console.print(printable(text), markup=False)
        try:
            yield
        finally:
            board.out = before
    print("\n".join(format_table(board.rows(), clock.now())))


@contextmanager
def redrawing(draw: Any) -> Iterator[Console]:
    """Redraw `draw(height)` a few times a second while the context is open, then erase it."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=unsanitized_stream(sys.stdout), highlight=False, soft_wrap=True)
    with Live(
        console=console, refresh_per_second=4, transient=True, get_renderable=lambda: draw(console.height - MIN_ROWS)
    ):
        yield console


def render_board(lines: Sequence[BoardRow], now: float, height: int) -> Any:
    """Render a table of as many runs as fit, and the states of the others."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    room = max(1, height)
    shown = list(lines)
    if len(shown) > room:
        shown = sorted(shown, key=lambda line: STATE_ORDER.index(line.state) if line.state in STATE_ORDER else 0)[:room]
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in HEADER:
        made.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1 if name == "overrides" else None)
    for line in shown:
        style = STYLES.get(line.state, "")
        made.add_row(
            *(Text(printable(cell), style=style if i == 3 else "") for i, cell in enumerate(format_row(line, now)))
        )
    hidden = [line for line in lines if line not in shown]
    rest = f"; not shown: {format_counts(hidden)}" if hidden else ""
    return Group(made, Text(f"{format_counts(lines)}{rest}", style="bold"))

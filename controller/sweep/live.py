"""Live view of a sweep: redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from controller.core.clock import Clock
from controller.core.layout import GAP, width_of, wrap
from controller.core.printable import printable, unsanitized_stream
from controller.sweep.board import Board, BoardRow, format_counts, format_table, layout_board

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
    with redrawing(lambda height, width: render_board(board.rows(), clock.now(), height, width)) as console:
        before, board.out = board.out, lambda text: console.print(printable(text), markup=False)
        try:
            yield
        finally:
            board.out = before
    print("\n".join(format_table(board.rows(), clock.now(), width_of(sys.stdout))))


@contextmanager
def redrawing(draw: Any) -> Iterator[Console]:
    """Redraw `draw(height, width)` a few times a second while the context is open, then erase it."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=unsanitized_stream(sys.stdout), highlight=False, soft_wrap=True)
    with Live(
        console=console,
        refresh_per_second=4,
        transient=True,
        get_renderable=lambda: draw(console.height - MIN_ROWS, console.width),
    ):
        yield console


def render_board(lines: Sequence[BoardRow], now: float, height: int, width: int) -> Any:
    """Render a table of as many runs as fit, and the states of the others."""
    from rich.console import Group
    from rich.text import Text

    room = max(1, height)
    shown = list(lines)
    if len(shown) > room:
        shown = sorted(shown, key=lambda line: STATE_ORDER.index(line.state) if line.state in STATE_ORDER else 0)[:room]
    titles, rows = layout_board(shown, now, width)
    made = [Text(GAP.join(titles).rstrip(), style="bold")]
    state_column = [title.strip() for title in titles].index("state")
    for row in rows[:room]:
        cells = [Text(cell) for cell in row]
        cells[state_column].stylize(next((STYLES[s] for s in STYLES if row[state_column].startswith(s)), ""))
        made.append(Text(GAP).join(cells))
    hidden = [line for line in lines if line not in shown]
    rest = f"; not shown: {format_counts(hidden)}" if hidden else ""
    made.append(Text(wrap(f"{format_counts(lines)}{rest}", width), style="bold"))
    return Group(*made)

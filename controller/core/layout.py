"""Fit text to the width of a terminal: shorten titles, wrap sentences, and lay out tables by priority.

A terminal has 80 columns unless its user makes it wider, so what tells rows apart must fit in 80.
"""

import os
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from controller.core.printable import one_line

DEFAULT_WIDTH = 80
GAP = "  "
"""Between two columns of a table."""
Concession = tuple[str, Sequence[str] | None]
"""A column and the shorter cells that it may have, or None if it may be left out."""


def width_of(stream: Any) -> int | None:
    """Return the columns of a terminal, or what $COLUMNS says; None for a file or pipe, where lines stay whole."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return int(given)
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError):  # it says that it is a terminal, but has no size
        return DEFAULT_WIDTH


def cell_width(text: str) -> int:
    """Return the columns that a text occupies: wide East Asian characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text
    )


def pad(text: str, width: int) -> str:
    return text + " " * max(0, width - cell_width(text))


def shorten(text: str, width: int) -> str:
    """Shorten a text to a width with an ellipsis before its last third: names often differ at their end."""
    if cell_width(text) <= width:
        return text
    end = _tail(text, max(0, (width - 1) // 3))
    start = _head(text, max(0, width - 1 - cell_width(end)))
    return f"{start}…{end}"


def wrap(text: str, width: int | None, indent: int = 0) -> str:
    """Wrap each line between words; further lines are indented. A word that is too long, such as a URL, stays whole."""
    if width is None:
        return text
    lines = [
        textwrap.wrap(
            line,
            max(width, indent + 20),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            replace_whitespace=False,
        )
        or [""]
        for line in text.splitlines()
    ]
    return "\n".join(part for line in lines for part in line)


def print_wrapped(lines: Iterable[str], indent: int = 2) -> None:
    """Print lines, wrapped to the width of the terminal."""
    width = width_of(sys.stdout)
    print("\n".join(wrap(line, width, indent) for line in lines))


def join_fitting(first: str, optional: Sequence[tuple[int, str]], width: int | None) -> str:
    """Join parts in their order; where there is no room, those of the highest rank are left out first.

    Args:
        first: the beginning of the line, which is always shown.
        optional: rank and text of each part; rank 0 is always shown.
        width: the columns of the line.
    """
    shown = [(rank, text) for rank, text in optional if text]
    while True:
        line = GAP.join([first, *(text for _, text in shown)])
        last = max((rank for rank, _ in shown), default=0)
        if width is None or cell_width(line) <= width or last == 0:
            return line
        index = max(i for i, (rank, _) in enumerate(shown) if rank == last)
        del shown[index]


def fit_table(
    columns: Mapping[str, Sequence[str]], width: int | None, concessions: Iterable[Concession] = (), folded: str = ""
) -> tuple[list[str], list[list[str]], list[str]]:
    """Lay out a table, and make concessions in order until it fits.

    Args:
        columns: cells by title; a name of a metric, say, may be any text, so each is shown on one line.
        width: columns of the terminal; None: unlimited.
        concessions: what may become shorter or be left out, the least important first.
        folded: title of the column whose cells are folded onto further lines if the table is too wide even so.

    Returns:
        The titles, the rows of padded cells (a folded cell makes several rows), and the titles that were left out.
    """
    shown = {one_line(title): [one_line(cell) for cell in cells] for title, cells in columns.items()}
    left_out: list[str] = []
    for title, shorter in ((one_line(title), cells) for title, cells in concessions):
        if width is None or _table_width(shown) <= width:
            break
        if title not in shown:
            continue
        if shorter is None:
            del shown[title]
            left_out.append(title)
        else:
            shown[title] = [one_line(cell) for cell in shorter]
    if width is not None and folded in shown and (over := _table_width(shown) - width) > 0:
        room = max(12, max(map(cell_width, [folded, *shown[folded]])) - over)
        shown = _fold(shown, folded, room)
    widths = {title: max(map(cell_width, [title, *cells])) for title, cells in shown.items()}
    titles = [pad(title, widths[title]) for title in shown]
    rows = [
        [pad(cell, widths[title]) for title, cell in zip(shown, row, strict=True)]
        for row in zip(*shown.values(), strict=True)
    ]
    return titles, rows, left_out


def _table_width(columns: Mapping[str, Sequence[str]]) -> int:
    widths = [max(map(cell_width, [title, *cells])) for title, cells in columns.items()]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _fold(columns: Mapping[str, Sequence[str]], folded: str, room: int) -> dict[str, list[str]]:
    """Break the cells of one column between words, or within a word that is too long; the other cells stay on top."""
    made: dict[str, list[str]] = {title: [] for title in columns}
    for i, cell in enumerate(columns[folded]):
        parts = textwrap.wrap(cell, room, break_on_hyphens=False) or [""]
        for title, cells in columns.items():
            made[title] += parts if title == folded else [cells[i], *[""] * (len(parts) - 1)]
    return made


def _head(text: str, width: int) -> str:
    while cell_width(text) > width:
        text = text[:-1]
    return text


def _tail(text: str, width: int) -> str:
    while cell_width(text) > width:
        text = text[1:]
    return text

"""Tables and text of the page."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from controller.report.drawing import format_number
from controller.report.markup import add_child, printable_text
from controller.report.stats import Comparison

Row = Sequence[object]
"""Cells of a table: text, or a function that fills the cell."""


def add_table(parent: Element, label: str, head: Sequence[str], rows: Sequence[Row], foot: Sequence[Row] = ()) -> None:
    """Add a table in a region that scrolls by itself, by keyboard too. `#…` heads a column of numbers."""
    region = add_child(parent, "div", class_="scroll", tabindex=0, role="region", aria_label=label)
    table = add_child(region, "table")
    titles = add_child(add_child(table, "thead"), "tr")
    classes = ["number" if title.startswith("#") else None for title in head]
    for title, name in zip(head, classes, strict=True):
        add_child(titles, "th", title.removeprefix("#"), scope="col", class_=name)
    for tag, group in (("tbody", rows), ("tfoot", foot)):
        body = add_child(table, tag) if group else table
        for cells in group:
            row = add_child(body, "tr")
            for i, (cell, name) in enumerate(zip(cells, classes, strict=True)):
                element = add_child(row, "td" if i else "th", scope=None if i else "row", class_=name)
                if callable(cell):
                    cell(element)
                else:
                    element.text = printable_text(cell)


def difference_cells(one: Comparison) -> tuple[str, str]:
    """Return the difference from the baseline and its interval; a dash where there is none."""
    width = None if one.low is None or one.high is None else one.high - one.low
    low, difference, high = (format_number(v, sign=True, by=width) for v in (one.low, one.difference, one.high))
    return difference, "–" if width is None else f"{low} to {high}"


def add_text(parent: Element, *parts: str | tuple[str, str], tag: str = "p", **attributes: object) -> None:
    """Add text in which a pair (tag, text) becomes an element."""
    whole = add_child(parent, tag, **attributes)
    for part in parts:
        if isinstance(part, tuple):
            add_child(whole, part[0], part[1])
        elif len(whole):
            whole[-1].tail = (whole[-1].tail or "") + printable_text(part)
        else:
            whole.text = (whole.text or "") + printable_text(part)

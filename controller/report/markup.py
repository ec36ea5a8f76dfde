"""HTML as a tree: xml.etree escapes text, so it cannot become markup; unprintable characters are written out."""

from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from controller.core.printable import printable

Row = Sequence[object]
"""Cells of a table: text, or a function that fills the cell."""


def add_child(parent: Element, tag: str, text: object = "", **attributes: object) -> Element:
    """Add a last child. `class_` sets the attribute class, `aria_label` aria-label; None and False omit one."""
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    child = SubElement(
        parent, tag, {k: _attribute_value(v) for k, v in given.items() if v is not None and v is not False}
    )
    if text != "":
        child.text = str(text) if tag == "style" else printable_text(text)
    return child


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


def printable_text(text: object) -> str:
    """Return text that is valid on a page, with control characters and lone surrogates written out."""
    return printable(str(text)).encode("utf-8", "backslashreplace").decode()


def serialize_page(root: Element) -> str:
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def _attribute_value(value: Any) -> str:
    return (
        ""
        if value is True
        else f"{value:.2f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else printable_text(value)
    )

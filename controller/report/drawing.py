"""HTML tables, and inline SVG of curves.

The page is a tree: xml.etree escapes text, so it cannot become markup; unprintable characters are written out.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from controller.core.text import printable
from controller.report.comparison import Comparison
from controller.report.curves import Curve

Row = Sequence[object]
"""Cells of a table: text, or a pair of an element and its text: `("code", …)`, `("span.text", …)` with a class."""


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
                if isinstance(cell, tuple):
                    tag_name, _, class_name = cell[0].partition(".")
                    add_child(element, tag_name, cell[1], class_=class_name or None)
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
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return "" if value is True else printable_text(value)


COLOURS, DASHES = 8, 3
"""Number of styles in page.css: the colors repeat with other dashes."""
WIDTH, HEIGHT, BOTTOM = 760, 300, 270
"""Size of a chart and the bottom of its plot, in SVG units."""
CHARACTER = 13.5
"""Width of a character of a small chart's labels, which are the largest, in SVG units."""
GAP = 9
"""Length of the dashes of a line that lies on others, in SVG units."""
MIN_TICK_DISTANCE = 0.18
"""Distance of two labels of an axis as a fraction of it, so that they fit on a phone."""


def colour(number: int) -> str:
    """Return the CSS classes of the n-th line."""
    return f"c{number % COLOURS} dash{number // COLOURS % DASHES}"


def line_chart(
    parent: Element, title: str, curves: Mapping[int, tuple[str, Curve]], marks: Iterable[tuple[float, str]] = ()
) -> None:
    """Add a chart of labeled curves, keyed by line number, with a vertical stroke at each mark: step and label."""
    steps = [step for _, curve in curves.values() for step in curve.steps]
    values = [value for _, curve in curves.values() for value in (*curve.low, *curve.high)]
    label = f"{title} by step; the table below has the last values"
    draw_chart(parent, label, steps, values, curves, x_name="step", marks=marks)


def draw_chart(
    parent: Element,
    label: str,
    xs: Collection[float],
    ys: Collection[float],
    curves: Mapping[int, tuple[str, Curve]],
    *,
    x_name: str = "",
    logarithmic: bool = False,
    marks: Iterable[tuple[float, str]] = (),
    points: Iterable[tuple[float, float]] = (),
) -> None:
    """Add a chart of labeled curves, marks and points, whose axes span `xs` and `ys`.

    What is higher or lower is drawn at the edge. `logarithmic` is the axis of x.
    """
    x_low, x_high, low, high = min(xs), max(xs), min(ys), max(ys)
    scale = math.log if logarithmic else float
    left, right = scale(x_low), scale(x_high)
    heights = ticks(low, high)  # of a flat curve: its one value
    margin = 0.06 * (high - low or abs(high) or 1.0)
    low, high = low - margin, high + margin
    if len(heights) > 1:
        heights = ticks(low, high)
    edge = 12 + CHARACTER * max(len(x_name), *(len(format_number(value)) for value in heights))

    def x(value: float) -> float:
        return edge + (WIDTH - edge - 20) * ((scale(value) - left) / (right - left) if right > left else 0.5)

    def y(value: float) -> float:
        return 10 + (BOTTOM - 10) * (high - min(max(value, low), high)) / (high - low)

    def path(line: Iterable[tuple[float, float]]) -> str:
        return "L".join(f"{x(at):.0f} {y(value):.1f}" for at, value in line)

    svg = add_child(parent, "svg", class_="chart", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    for value in heights:
        add_child(svg, "line", class_="grid", x1=edge, x2=WIDTH - 20, y1=y(value), y2=y(value))
        add_child(svg, "text", format_number(value), x=edge - 8, y=y(value) + 4, text_anchor="end")
    if x_name:
        add_child(svg, "text", x_name, x=edge - 8, y=BOTTOM + 20, text_anchor="end")
    for at in x_ticks(x_low, x_high, logarithmic=logarithmic):
        anchor = "middle" if x_low == x_high or x_low < at < x_high else "start" if at == x_low else "end"
        add_child(svg, "text", format_number(at), x=x(at), y=BOTTOM + 20, text_anchor=anchor)
    for at, text in marks:
        if x_low <= at <= x_high:
            stroke = add_child(svg, "line", class_="interrupted", x1=x(at), x2=x(at), y1=10, y2=BOTTOM)
            add_child(stroke, "title", text)
    drawn: list[str] = []
    for number, (name, curve) in curves.items():
        if curve.low != curve.high:
            outline = [
                *zip(curve.steps, curve.high, strict=True),
                *reversed([*zip(curve.steps, curve.low, strict=True)]),
            ]
            add_child(svg, "path", class_=f"band {colour(number)}", d=f"M{path(outline)}Z")
        if curve.told:
            add_child(
                svg,
                "path",
                class_=f"line told {colour(number)}",
                d=f"M{path(zip(curve.steps, curve.told, strict=True))}",
            )
        middle = path(zip(curve.steps, curve.mean, strict=True))
        shape = f"M{middle}" if len(curve.steps) > 1 else f"M{middle}h4"
        hidden = drawn.count(shape)  # lines below this one that it would hide: leave gaps that show them
        gaps = {"stroke_dasharray": f"{GAP} {hidden * GAP}"} if hidden else {}
        drawn.append(shape)
        line = add_child(svg, "path", class_=f"line {colour(number)}", d=shape, **gaps)
        add_child(line, "title", name)
    for at, value in points:
        point = add_child(svg, "circle", class_=f"point {colour(1)}", cx=x(at), cy=y(value), r=4)
        add_child(point, "title", f"{format_number(at)}: {format_number(value)}")


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return at most about `count` round values in a range: 1, 2 or 5 times a power of ten apart."""
    if low >= high:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power * count >= (high - low) * (1 - 1e-9))
    return [i * gap for i in range(math.ceil(low / gap), math.floor(high / gap) + 1)]


def x_ticks(low: float, high: float, *, logarithmic: bool = False) -> list[float]:
    """Return the values of x to label: the first and the last one, and round ones that are not close to these.

    Between whole numbers, such as steps, all are whole.
    """
    if low >= high:
        return [low]
    if logarithmic:
        room = (high / low) ** MIN_TICK_DISTANCE
        powers = (10.0**p for p in range(math.ceil(math.log10(low)), math.ceil(math.log10(high))))
        return [low, *(x for x in powers if low * room <= x <= high / room), high]
    room = MIN_TICK_DISTANCE * (high - low)
    inner = [x for x in ticks(low, high, 4) if low + room <= x <= high - room]
    whole = float(low).is_integer() and float(high).is_integer()
    return [low, *(x for x in inner if x.is_integer() or not whole), high]


def format_time(time: float) -> str:
    """Return the UTC date and time; a dash where a record holds no possible one."""
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "–"


def format_duration(seconds: float) -> str:
    """Format a duration: `41 s`, `12.3 min`, `5.2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_number(value: float | None, *, sign: bool = False, by: float | None = None) -> str:
    """Format with four digits, or the decimals that a spread `by` justifies; a dash for None."""
    if value is None:
        return "–"
    how = ".4g"
    if by and 1e-5 < by < 1e5 and abs(value) < 1e6:
        how = f".{max(0, 2 - math.floor(math.log10(by)))}f"
    return f"{value:{'+' if sign else ''}{how}}".replace("-", "−")


def difference_cells(one: Comparison) -> tuple[str, str]:
    """Return the difference from the baseline and its interval; a dash where there is none."""
    width = None if one.low is None or one.high is None else one.high - one.low
    low, difference, high = (format_number(v, sign=True, by=width) for v in (one.low, one.difference, one.high))
    return difference, "–" if width is None else f"{low} to {high}"

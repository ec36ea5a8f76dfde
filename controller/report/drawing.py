"""The small pictures in tables, as inline SVG: where the time went, and an interval about its difference."""

from __future__ import annotations

import math
from xml.etree.ElementTree import Element

from controller.report.markup import add_child
from controller.report.stats import Comparison
from controller.report.timeline import Timeline

COLOURS, DASHES = 8, 3
"""Of lines: colour by colour, then the same in other dashes; page.css and page.js have as many."""
WIDTH = 1000.0


def swatch(parent: Element, number: int) -> Element:
    """The line of a setting, as the chart draws it."""
    svg = add_child(parent, "svg", class_="swatch", viewBox="0 0 26 10", aria_hidden="true")
    colour = f"line l{number % COLOURS} dash{number // COLOURS % DASHES}"
    return add_child(svg, "path", class_=colour, d="M1 5H25")


def legend_square(parent: Element, kind: str) -> None:
    """The colour of a kind of time."""
    svg = add_child(parent, "svg", viewBox="0 0 10 10", aria_hidden="true")
    add_child(svg, "rect", class_=kind, width=10, height=10, rx=2)


def timeline_bar(parent: Element, time: Timeline, longest: float, words: str) -> None:
    """The spans of a run, as long as they took, of the longest run's time; a stroke for each interruption."""
    svg = add_child(
        parent, "svg", class_="bar", viewBox=f"0 0 {WIDTH:.0f} 18", preserveAspectRatio="none", role="img",
        aria_label=words,
    )  # fmt: skip
    by = WIDTH / (longest or 1.0)
    for span in time.spans:
        x = (span.began - time.began) * by
        rect = add_child(svg, "rect", class_=span.kind, x=x, width=max(1.0, span.seconds * by), height=18)
        add_child(rect, "title", f"{span.kind}: {format_duration(span.seconds)}")
    for mark in time.marks:
        x = (mark.time - time.began) * by
        line = add_child(svg, "line", class_="mark", x1=x, x2=x, y1=0, y2=18)
        add_child(line, "title", mark.words)


def whisker(parent: Element, one: Comparison, low: float, high: float) -> None:
    """A difference and its interval on an axis from low to high, with a line at 0; the cells beside it say the same."""
    svg = add_child(parent, "svg", class_="whisker", viewBox="0 0 160 20", aria_hidden="true")

    def x(value: float) -> float:
        return 6 + 148 * (value - low) / ((high - low) or 1.0)

    add_child(svg, "line", class_="zero", x1=x(0), x2=x(0), y1=0, y2=20)
    if one.difference is None:
        return
    group = add_child(svg, "g", class_="sure" if one.differs else "unsure")
    if one.low is not None and one.high is not None:
        add_child(group, "line", class_="range", x1=x(one.low), x2=x(one.high), y1=10, y2=10)
    add_child(group, "circle", cx=x(one.difference), cy=10, r=4)


def format_duration(seconds: float) -> str:
    """`41 s`, `12.3 min`, `5.2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_number(value: float | None, *, sign: bool = False, by: float | None = None) -> str:
    """Four digits, or as many decimals as a spread that it is judged by has with three; a dash where there is none."""
    if value is None:
        return "–"
    how = ".4g"
    if by and 1e-5 < by < 1e5 and abs(value) < 1e6:
        how = f".{max(0, 2 - math.floor(math.log10(by)))}f"
    return f"{value:{'+' if sign else ''}{how}}".replace("-", "−")

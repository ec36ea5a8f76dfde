"""The section about a metric against a number: the runs, the fit with its band, and a table of the settings."""

import math
from collections.abc import Callable, Iterable
from statistics import fmean
from xml.etree.ElementTree import Element

from controller.core.text import plural
from controller.report.drawing import (
    BOTTOM,
    LEFT,
    WIDTH,
    colour,
    difference_cells,
    format_duration,
    format_number,
    ticks,
)
from controller.report.markup import add_child, add_table, add_text
from controller.report.model import ReportModel
from controller.report.power_law import SAMPLES, PowerLaw
from controller.report.scaling import Scaling, ScalingRow

HEIGHT = 300
LOGARITHMIC_FROM = 4.0
"""Ratio of the largest to the smallest x from which the axis is logarithmic."""


def scaling_lines(scaling: Scaling) -> list[str]:
    """Return what a terminal shows: the fit, the Pareto front, who reached the level."""
    front = ", ".join(f"{format_number(row.x)}: {_mean(row)}" for row in scaling.rows if row.on_front)
    lines = [
        f"{scaling.metric[1]} against {scaling.x_name}: {plural(len(scaling.points), 'run')}; Pareto front {front}"
    ]
    if scaling.fit:
        lines += [f"  {line}" for line in fit_lines(scaling.fit)]
    if scaling.level is not None:
        reached = [f"{format_number(row.x)}: {_reached(row)}" for row in scaling.rows]
        lines.append(f"  reached {scaling.level:g} at {'; '.join(reached)}")
    if scaling.left_out:
        lines.append(f"  left out: {plural(scaling.left_out, 'run')} without {scaling.x_name} or {scaling.metric[1]}")
    return lines


def fit_lines(fit: PowerLaw) -> list[str]:
    """Return the fit and its intervals in words."""
    sign, size = ("-", fit.b) if fit.b >= 0 else ("+", -fit.b)
    intervals = ", ".join(
        f"{name} {format_number(low)} to {format_number(high)}"
        for name, (low, high) in (("a", fit.a_interval), ("b", fit.b_interval), ("c", fit.c_interval))
    )
    lines = [
        f"y = {fit.a:.4g} {sign} {size:.4g} x^-{fit.c:.4g}, residual {fit.deviation:.2g}, {fit.points} runs",
        f"95 %: {intervals} ({SAMPLES:,} bootstrap samples)",
    ]
    if fit.is_open:
        lines.append("the exponent's interval reaches the end of the search: these runs do not determine it")
    return lines


def scaling_section(section: Element, scaling: Scaling, report: ReportModel) -> None:
    """Add the chart, the fit in words and the table."""
    _chart(section, scaling)
    for line in fit_lines(scaling.fit) if scaling.fit else ():
        add_text(section, line)
    level = () if scaling.level is None else (f"reached {scaling.level:g}",)
    head = ["setting", f"#{scaling.x_name}", "#seeds", "#mean", "#± std", "#difference", "95 % interval", "how"]
    rows = [[*_cells(row), *((_reached(row),) if level else ())] for row in scaling.rows]
    add_table(section, f"{scaling.metric[1]} against {scaling.x_name}", [*head, "Pareto front", *level], rows)
    add_text(
        section,
        f"Differences are to {report.settings[0].label}. Their intervals hold for all settings together (Bonferroni). "
        "A setting is on the Pareto front if no other has less x and a better mean. Times are of training, without "
        "interruptions.",
        class_="soft",
    )
    if scaling.left_out:
        add_text(section, f"Left out, without such a number: {plural(scaling.left_out, 'run')}.", class_="soft")


def _cells(row: ScalingRow) -> list[object]:
    one = row.compared
    mean, deviation = (format_number(value, by=one.deviation) for value in (one.mean, one.deviation))
    compared = [*difference_cells(one), one.how] if one.how else ["baseline", "", ""]
    return [row.setting.label, format_number(row.x), one.n, mean, deviation, *compared, "yes" if row.on_front else "–"]


def _mean(row: ScalingRow) -> str:
    return format_number(row.compared.mean, by=row.compared.deviation)


def _reached(row: ScalingRow) -> str:
    """Return `step 1,200, 12.3 min (2 of 3)`: means over the runs that reached the level."""
    if not row.reached:
        return "never"
    steps, seconds = (fmean(getattr(one, name) for one in row.reached) for name in ("steps", "seconds"))
    return f"step {steps:,.0f}, {format_duration(seconds)} ({len(row.reached)} of {row.compared.n})"


def _chart(parent: Element, scaling: Scaling) -> None:
    xs, ys = zip(*scaling.points, strict=True)
    bands = scaling.fit.curve if scaling.fit else ()
    low, high = min(*ys, *(band[1] for band in bands), ys[0]), max(*ys, *(band[1] for band in bands), ys[0])
    margin = 0.08 * (high - low or abs(high) or 1.0)
    low, high = low - margin, high + margin
    place, marks = _axis(min(xs), max(xs))

    def y(value: float) -> float:
        return 10 + (BOTTOM - 10) * (high - min(max(value, low), high)) / (high - low)

    def path(points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{place(at):.0f} {y(value):.1f}" for at, value in points)

    label = f"{scaling.metric[1]} against {scaling.x_name}; the table below has the means"
    svg = add_child(parent, "svg", class_="chart", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    for value in ticks(low, high):
        add_child(svg, "line", class_="grid", x1=LEFT, x2=WIDTH - 20, y1=y(value), y2=y(value))
        add_child(svg, "text", format_number(value), x=LEFT - 8, y=y(value) + 4, text_anchor="end")
    for at in marks:
        add_child(svg, "text", format_number(at), x=place(at), y=BOTTOM + 20, text_anchor="middle")
    if bands:
        outline = [*((x, top) for x, _, _, top in bands), *((x, bottom) for x, _, bottom, _ in reversed(bands))]
        add_child(svg, "path", class_=f"band {colour(0)}", d=path(outline) + "Z")
        add_child(svg, "path", class_=f"line {colour(0)}", d=path((x, middle) for x, middle, _, _ in bands))
    for at, value in scaling.points:
        point = add_child(svg, "circle", class_=f"point {colour(1)}", cx=place(at), cy=y(value), r=4)
        add_child(point, "title", f"{format_number(at)}: {format_number(value)}")


def _axis(low: float, high: float) -> tuple[Callable[[float], float], list[float]]:
    """Return where x lies on the axis, and the values to label."""
    logarithmic = low > 0 and high / low >= LOGARITHMIC_FROM
    scale = math.log if logarithmic else float
    first, last = scale(low), scale(high)

    def place(at: float) -> float:
        return LEFT + 20 + (WIDTH - LEFT - 60) * ((scale(at) - first) / (last - first) if last > first else 0.5)

    if not logarithmic:
        return place, ticks(low, high)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inner = [power for p in powers if low * 1.3 < (power := 10.0**p) < high / 1.3]
    return place, [low, *inner, high]

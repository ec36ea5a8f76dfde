"""The top of the page: what the sweep asked, a small chart of each of the metrics that matter, each run's results."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from xml.etree.ElementTree import Element

from controller.core.metric_lines import result_lines
from controller.core.text import plural
from controller.report.curves import build_curve, is_preferred, points_per_curve
from controller.report.drawing import colour, difference_cells, format_number, line_chart
from controller.report.gather import RESULT_FILE, Metric, RecordedRun
from controller.report.markup import Row, add_child, add_table, add_text
from controller.report.model import ReportModel

MAX_CHARTS, MAX_RESULTS = 4, 6


def summary_section(section: Element, report: ReportModel) -> None:
    """Add the hypothesis, the charts, a table of the runs' results, and the commands that show more."""
    if rows := list(hypothesis_rows(report)):
        add_table(section, "What was asked and expected, and what was found", ["hypothesis", ""], rows)
    charts = add_child(section, "div", class_="charts")
    points = points_per_curve(report.metrics, report.settings)
    for metric in overview_metrics(report):
        built = enumerate((setting.label, build_curve(setting, metric, points)) for setting in report.settings)
        curves = {number: (label, curve) for number, (label, curve) in built if curve}
        if curves:
            figure = add_child(charts, "figure")
            add_child(figure, "figcaption", metric[1])
            line_chart(figure, metric[1], curves, report.interrupted_steps(metric))
    add_table(
        section, "Results", ["setting", "#seed", "state", "result"], [_result_row(run, report) for run in report.runs]
    )
    run = report.runs[-1].id
    parts: list[str | tuple[str, str]] = ["More: "]
    for command in (f"slipway logs --run {run}", f"slipway get {run}", "slipway tensorboard"):
        parts += [("code", command), " · "]
    add_text(section, *parts[:-1], class_="soft")


def overview_metrics(report: ReportModel) -> list[Metric]:
    """Return the metrics of the small charts: one of each name, in the order of the page."""
    chosen: dict[str, Metric] = {}
    for metric in report.metrics:
        if metric[0] != RESULT_FILE and (is_preferred(metric) or not chosen):
            chosen.setdefault(metric[1], metric)
    return list(chosen.values())[:MAX_CHARTS]


def _result_row(run: RecordedRun, report: ReportModel) -> Row:
    metrics: Any = run.row.get("metrics")
    lines = result_lines(metrics)[:MAX_RESULTS] if isinstance(metrics, dict) and metrics else ["–"]
    text = partial(add_child, tag="span", text="\n".join(" ".join(line.split()) for line in lines), class_="text")
    setting = report.setting_of(run)
    label = partial(add_child, tag="span", text=setting.label, class_=colour(report.settings.index(setting)))
    return [label, "–" if run.seed is None else run.seed, run.state, text]


def hypothesis_rows(report: ReportModel) -> Iterator[tuple[str, str]]:
    """Yield what was asked and expected beside what was found, each with its name; nothing without a hypothesis."""
    if report.asked is None:
        return
    said = report.asked.hypothesis
    yield from (("question", said.question), ("expected", said.expected), ("decision", said.decision))
    yield from (("but", misfit) for misfit in report.asked.misfits)
    metric = next((metric for metric in report.metrics if metric[1] == said.metric), None)
    if metric is None:
        yield "found", f"no run has {said.metric} yet"
        return
    for i, (setting, one) in enumerate(zip(report.settings, report.comparisons(metric), strict=True)):
        mean = f"{setting.label}: {format_number(one.mean, by=one.deviation)}, {plural(one.n, 'seed')}"
        difference, interval = difference_cells(one)
        yield ("", f"{mean}; difference {difference}, 95 %: {interval}") if i else ("found", f"{said.metric} of {mean}")

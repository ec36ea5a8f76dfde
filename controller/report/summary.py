"""The top of the page: a small chart of each of the metrics that matter, and what each run achieved."""

from functools import partial
from typing import Any
from xml.etree.ElementTree import Element

from controller.core.metric_lines import result_lines
from controller.report.curves import build_curve, is_preferred, points_per_curve
from controller.report.drawing import colour, line_chart
from controller.report.gather import RESULT_FILE, Metric, RecordedRun
from controller.report.markup import Row, add_child, add_table, add_text
from controller.report.model import ReportModel

MAX_CHARTS, MAX_RESULTS = 4, 6


def summary_section(section: Element, report: ReportModel) -> None:
    """Add the charts, a table of the runs' results, and the commands that show more."""
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

"""Render the page as one file without scripts; its Content-Security-Policy allows its own style and no request.

The policy names the style by its hash: https://www.w3.org/TR/CSP3/
"""

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from typing import Any
from xml.etree.ElementTree import Element

from controller.core.text import plural, result_values
from controller.core.this_process import DISTRIBUTION
from controller.report.contents import ReportModel
from controller.report.curves import is_preferred
from controller.report.drawing import (
    Row,
    add_child,
    add_table,
    add_text,
    colour,
    difference_cells,
    format_number,
    format_time,
    serialize_page,
)
from controller.report.gather import RESULT_FILE, Metric, RecordedRun
from controller.report.scaling import Scaling, scaling_section
from controller.report.sections import add_charts, metrics_section, time_section, transcripts_section

MAX_CHARTS, MAX_RESULTS, MAX_LEGEND, MAX_NAMES = 4, 5, 24, 40


def summary_section(section: Element, report: ReportModel) -> None:
    """Add the hypothesis, the charts, a table of the runs' results, and the commands that show more."""
    if rows := list(hypothesis_rows(report)):
        add_table(section, "What was asked and expected, and what was found", ["hypothesis", ""], rows)
    charts = add_child(section, "div", class_="charts")
    add_charts(charts, report, overview_metrics(report))
    if len(charts) and len(report.settings) > 1:
        legend = add_child(section, "ul", class_="legend")
        for i, setting in enumerate(report.settings[:MAX_LEGEND]):
            add_child(legend, "li", setting.label, class_=colour(i))
        if len(report.settings) > MAX_LEGEND:
            add_child(legend, "li", f"and {plural(len(report.settings) - MAX_LEGEND, 'more setting')}")
    _add_results(section, report)
    last = report.runs[-1]
    parts: list[str | tuple[str, str]] = ["More: "]
    curves_of_trainer = [] if last.row.get("program") else ["slipway tensorboard"]
    for command in (f"slipway logs --run {last.id}", f"slipway get {last.id}", *curves_of_trainer):
        parts += [("code", command), " · "]
    add_text(section, *parts[:-1], class_="soft")


def overview_metrics(report: ReportModel) -> list[Metric]:
    """Return the metrics of the small charts: one of each name, in the order of the page."""
    chosen: dict[str, Metric] = {}
    for metric in report.metrics:
        if metric[0] != RESULT_FILE and (is_preferred(metric) or not chosen):
            chosen.setdefault(metric[1], metric)
    return list(chosen.values())[:MAX_CHARTS]


def _add_results(section: Element, report: ReportModel) -> None:
    """Add a table with a line for each run, by setting and seed, and a column for each result."""

    def seed(run: RecordedRun) -> tuple[bool, float, str]:
        is_number = isinstance(run.seed, int | float)
        return not is_number, float(run.seed or 0) if is_number else 0.0, str(run.seed)

    runs = [run for setting in report.settings for run in sorted(setting.runs, key=seed)]
    told: list[dict[str, str]] = []
    for run in runs:
        metrics: Any = run.row.get("metrics")
        main, others = result_values(metrics) if isinstance(metrics, dict) else ({}, {})
        told.append(main | others)
    names = list(dict.fromkeys(name for each in told for name in each))
    shown = names[:MAX_RESULTS]
    rows = [
        _result_row(run, report, [each.get(name, "–") for name in shown]) for run, each in zip(runs, told, strict=True)
    ]
    add_table(section, "Results", ["setting", "#seed", "state", *(f"#{name}" for name in shown)], rows)
    if further := names[MAX_RESULTS:]:
        add_text(section, f"Also in summary.json: {', '.join(further[:MAX_NAMES])}.", class_="soft")


def _result_row(run: RecordedRun, report: ReportModel, results: Sequence[str]) -> Row:
    setting = report.setting_of(run)
    label = (f"span.{colour(report.settings.index(setting))}", setting.label)
    return [label, "–" if run.seed is None else run.seed, run.state, *results]


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


def runs_section(section: Element, report: ReportModel) -> None:
    """List the runs with their config and code, so that every number can be traced."""
    add_text(
        section,
        "Each number can be traced to a record: ",
        ("code", "slipway runs --diff A B"),
        " shows what differs between two runs, ",
        ("code", "slipway up --run ID"),
        " repeats one, code and data included.",
    )
    head = ["run", "setting", "#seed", "state", "began (UTC)", "#seconds", "commit", "code"]
    rows = [_run_row(run, report) for run in [*report.runs, *report.superseded_runs]]
    add_table(section, "Runs", head, rows)


def _run_row(run: RecordedRun, report: ReportModel) -> Row:
    label = report.setting_of(run).label
    if run in report.superseded_runs:
        label += " (left out: a later run has the same seed)"
    created, seconds = run.row.get("created"), run.row.get("seconds")
    began = format_time(created) if isinstance(created, int | float) else "–"
    took = format_number(seconds if isinstance(seconds, int | float) else None)
    origin = [("code", str(run.row.get(key) or "–")[:12]) for key in ("commit", "code")]
    return [("code", run.id), label, "–" if run.seed is None else run.seed, run.state, began, took, *origin]


Section = tuple[str, str, Callable[[Element, ReportModel], None]]
"""Id, title, and the function that fills it."""
SECTIONS: tuple[Section, ...] = (
    ("summary", "Summary", summary_section),
    ("metrics", "Learning curves and comparisons", metrics_section),
    ("time", "Time and cost", time_section),
    ("transcripts", "Sample transcripts", transcripts_section),
    ("runs", "Runs", runs_section),
)


def render(report: ReportModel, now: float, scaling: Scaling | None = None) -> str:
    """Return the page.

    Args:
        report: the contents.
        now: time of creation, seconds since the epoch.
        scaling: a metric against a number, for a section after the summary.
    """
    style = files("controller.report").joinpath("page.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    root = Element("html", {"lang": "en"})
    head = add_child(root, "head")
    add_child(head, "meta", charset="utf-8")
    add_child(head, "meta", http_equiv="Content-Security-Policy", content=policy)
    add_child(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add_child(head, "meta", name="referrer", content="no-referrer")
    add_child(head, "title", f"{report.name}: report")
    add_child(head, "link", rel="icon", href="data:,")
    add_child(head, "style", style)
    body = add_child(root, "body")
    sections = list(SECTIONS)
    if not report.settings[1:]:
        sections = [(name, title.removesuffix(" and comparisons"), fill) for name, title, fill in sections]
    if all(run.row.get("program") and not run.transcripts for run in report.runs):
        sections = [each for each in sections if each[0] != "transcripts"]
    if scaling:
        title = f"{scaling.metric[1]} against {scaling.x_name}"
        sections.insert(1, ("scaling", title, lambda section, report: scaling_section(section, scaling, report)))
    _header(add_child(body, "header"), report, now, sections)
    main = add_child(body, "main")
    for name, title, fill in sections:
        section = add_child(main, "section", id=name, aria_labelledby=f"{name}-title")
        add_child(section, "h2", title, id=f"{name}-title")
        fill(section, report)
    return serialize_page(root)


def _header(header: Element, report: ReportModel, now: float, sections: Sequence[Section]) -> None:
    add_child(header, "h1", report.name)
    when = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M")
    add_child(header, "p", f"Report of {when} UTC by slipway {version(DISTRIBUTION)}", class_="soft")
    times = [report.times[run.id] for run in report.runs]
    costs = [time.usd for time in times if time.usd is not None]
    states = [run.state for run in report.runs]
    facts = {
        **({"settings": len(report.settings), "runs": len(states)} if states[1:] else {}),
        "state": states[0]
        if not states[1:]
        else ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        "interruptions": sum(len(time.interruptions) for time in times),
        "alerts": sum(len(time.alerts) for time in times),
        "pod hours": f"{sum(time.pod_hours or 0.0 for time in times):.2f}",
        "cost": f"${sum(costs):,.2f}" if costs else "not billed or unknown",
    }
    listed = add_child(header, "dl")
    for name, value in facts.items():
        fact = add_child(listed, "div")
        add_child(fact, "dt", name)
        add_child(fact, "dd", value)
    links = add_child(add_child(header, "nav", aria_label="Sections"), "ul")
    for name, title, _ in sections:
        add_child(add_child(links, "li"), "a", title, href=f"#{name}")

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

from controller.core.text import format_number as format_result
from controller.core.text import plural, result_values
from controller.core.this_process import DISTRIBUTION
from controller.report.contents import SPAN_KINDS, ReportModel, Timeline, is_preferred
from controller.report.drawing import (
    Row,
    add_child,
    add_table,
    add_text,
    colour,
    difference_cells,
    format_duration,
    format_number,
    line_chart,
    serialize_page,
)
from controller.report.gather import RESULT_FILE, Metric, RecordedRun
from controller.report.scaling import Scaling, scaling_section

MAX_CHARTS, MAX_RESULTS, MAX_LEGEND, MAX_NAMES = 4, 5, 24, 40


def summary_section(section: Element, report: ReportModel) -> None:
    """Add the hypothesis, the charts, a table of the runs' results, and the commands that show more."""
    if rows := list(hypothesis_rows(report)):
        add_table(section, "What was asked and expected, and what was found", ["hypothesis", ""], rows)
    charts = add_child(section, "div", class_="charts")
    for metric in overview_metrics(report):
        if curves := report.curves(metric):
            figure = add_child(charts, "figure")
            add_child(figure, "figcaption", metric[1])
            line_chart(figure, metric[1], curves, report.interrupted_steps(metric))
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


MAX_TRANSCRIPT_RUNS, MAX_TRANSCRIPTS, MAX_TEXT_LENGTH = 24, 4, 2000
MAX_ALERTS = 100
COMPARED = (
    ", the baseline, with 95 % intervals. paired: Student's t of the differences between runs with the same seed; "
    "Welch: Welch's t, where fewer than two seeds are in both. Both assume normal distributions, hold for a single "
    "comparison, and are wide with few seeds (arXiv:1904.06979). There is no interval where all differences are equal."
)
COMPARISON_COLUMNS = ("#difference", "95 % interval", "how")


def metrics_section(section: Element, report: ReportModel) -> None:
    """Add a fold per metric with its curves and the comparison of settings."""
    if not report.metrics:
        add_text(section, "No run has metrics.jsonl or summary.json.", class_="soft")
        return
    alone = len(report.settings) == 1
    add_text(
        section,
        "Each line is the mean over the seeds of a setting; its band spans the lowest to the highest seed. A vertical "
        "stroke marks an interruption. The tables show the last value of each finished run",
        *(() if alone else (" and the difference from ", ("b", report.settings[0].label), COMPARED)),
        "." if alone else "",
    )
    phase = ""
    for i, metric in enumerate(metric for metric in report.metrics if metric not in report.constants):
        name = f"{metric[0]}: {metric[1]}" if metric[0] else metric[1]
        if i and not is_preferred(metric) and metric[0] != phase:  # the first ones are of several phases
            phase = metric[0]
            add_child(section, "h3", phase)
        fold = add_child(section, "details", open=i == 0)
        add_child(fold, "summary", name)
        if curves := report.curves(metric):
            line_chart(fold, name, curves, report.interrupted_steps(metric))
        caption = "at the end of each run" if metric[0] == RESULT_FILE else "last value of each run"
        # On a phone only the first columns are visible without scrolling.
        head = ["setting", "#mean", *(() if alone else COMPARISON_COLUMNS), "#± std", "#seeds"]
        add_table(fold, f"{name}, {caption}", head, _comparison_rows(report, metric, alone=alone))
        if missing := report.runs_without_end(metric):
            named = "; ".join(map(report.run_label, missing))
            add_text(fold, f"In no mean, since their last value is not finite: {named}.", class_="soft")
    if report.constants:
        named = ", ".join(f"{phase} {name} {format_result(value)}" for (phase, name), value in report.constants.items())
        add_text(section, f"The same at every step of every run: {named}.", class_="soft")
    if report.omitted_metrics:
        add_text(section, f"{plural(report.omitted_metrics, 'further metric')} left out.", class_="soft")


def _comparison_rows(report: ReportModel, metric: Metric, *, alone: bool) -> list[Row]:
    compared = report.comparisons(metric)
    rows: list[Row] = []
    for i, (setting, one) in enumerate(zip(report.settings, compared, strict=True)):
        seeds = f"{one.n}" if one.n == len(setting.runs) else f"{one.n} of {len(setting.runs)}"
        mean, deviation = (format_number(value, by=one.deviation) for value in (one.mean, one.deviation))
        label = (f"span.{colour(i)}", setting.label)
        if i == 0:
            rows.append([label, mean, *(() if alone else ("baseline", "", "")), deviation, seeds])
            continue
        difference, interval = difference_cells(one)
        how = f"{one.how}, {plural(one.pairs, 'pair')}" if one.how == "paired" else one.how or "–"
        shown = ("b", interval) if one.is_significant else interval
        rows.append([label, mean, difference, shown, how, deviation, seeds])
    return rows


def time_section(section: Element, report: ReportModel) -> None:
    """Show each run's time and cost, and its interruptions."""
    times = [report.times[run.id] for run in report.runs]
    kinds = [kind for kind in SPAN_KINDS if any(time.seconds_of(kind) for time in times)]
    keys = add_child(section, "ul")
    for kind in kinds:
        add_child(keys, "li", f"{kind}: {SPAN_KINDS[kind]}")
    columns = [f"#{kind}" for kind in kinds]
    head = ["setting", "#seed", *columns, "#attempts", "#goodput", "#pod hours", "#USD"]
    rows: list[Row] = []
    for run, time in zip(report.runs, times, strict=True):
        spent = [format_duration(time.seconds_of(kind)) if time.seconds_of(kind) else "–" for kind in kinds]
        cost = _cost_cells(time.attempts, time.goodput, time.pod_hours, time.usd)
        rows.append([report.setting_of(run).label, "–" if run.seed is None else run.seed, *spent, *cost])
    add_table(section, "Time and cost of each run", head, rows, [_totals(times, kinds)])
    add_text(
        section,
        "goodput: the time of updates and evaluations that count, divided by the time that the run had its pods. Pod "
        "hours and USD are as recorded at the end of each run, at list prices; a dash means that nothing is billed or "
        "the price is unknown.",
        class_="soft",
    )
    marks = [(run, mark) for run, time in zip(report.runs, times, strict=True) for mark in time.interruptions]
    if marks:
        add_child(section, "h3", "Interruptions")
        listed = add_child(section, "ul")
        for run, mark in marks:
            add_text(listed, ("b", report.run_label(run)), f", {_format_time(mark.time)} UTC: {mark.message}", tag="li")
    raised = [(run, alert) for run, time in zip(report.runs, times, strict=True) for alert in time.alerts]
    if raised:
        add_child(section, "h3", "Alerts")
        listed = add_child(section, "ul")
        for run, alert in raised[:MAX_ALERTS]:
            ended = "" if alert.ended is None else f", over after {format_duration(alert.ended - alert.time)}"
            said = f", {_format_time(alert.time)} UTC{ended}: "
            add_text(listed, ("b", report.run_label(run)), said, ("b", alert.name), f": {alert.message}", tag="li")
        if (rest := len(raised) - MAX_ALERTS) > 0:
            add_text(section, f"{plural(rest, 'further alert')} left out.", class_="soft")


def _totals(times: Sequence[Timeline], kinds: Sequence[str]) -> Row:
    hours = [time.pod_hours for time in times if time.pod_hours is not None]
    costs = [time.usd for time in times if time.usd is not None]
    useful = [time for time in times if time.goodput is not None]
    paid = sum(3600 * time.pod_hours if time.pod_hours else time.seconds for time in useful)
    goodput = sum(time.seconds_of("training") for time in useful) / paid if paid else None
    spent = [format_duration(sum(time.seconds_of(kind) for time in times)) for kind in kinds]
    attempts = sum(time.attempts for time in times)
    return ["all", "", *spent, *_cost_cells(attempts, goodput, sum(hours) or None, sum(costs) if costs else None)]


def _cost_cells(attempts: int, goodput: float | None, hours: float | None, usd: float | None) -> list[object]:
    return [
        attempts or "–",
        "–" if goodput is None else f"{100 * goodput:.0f} %",
        "–" if hours is None else f"{hours:.2f}",
        "–" if usd is None else f"{usd:,.2f}",
    ]


def transcripts_section(section: Element, report: ReportModel) -> None:
    """Add a fold per run with some questions, each with the first and the last answer."""
    runs = [run for run in report.runs if run.transcripts]
    if not runs:
        add_text(section, "No run has transcripts.jsonl on this machine.", class_="soft")
    for run in runs[:MAX_TRANSCRIPT_RUNS]:
        fold = add_child(section, "details")
        head = ["step", "prompt", "response", "parsed answer", "expected answer", "#reward"]
        documents = sample_transcripts(run.transcripts)
        count = f"{len(documents)} of {plural(len(run.transcripts), 'transcript')}"
        add_child(fold, "summary", f"{report.run_label(run)}: {count}")
        rows = [_transcript_row(document) for document in documents]
        add_table(fold, f"Transcripts of {report.run_label(run)}", head, rows)
    if (rest := len(runs) - MAX_TRANSCRIPT_RUNS) > 0:
        add_text(section, f"{rest} further runs have transcripts.jsonl.", class_="soft")


def _transcript_row(document: dict[str, Any]) -> Row:
    when = " ".join(str(document.get(key, ""))[:40] for key in ("step", "phase"))
    values = [document.get(key) for key in ("prompt", "response", "extracted", "answer")]
    texts = ["nothing" if value is None else str(value) for value in values]
    texts = [text if len(text) <= MAX_TEXT_LENGTH else f"{text[:MAX_TEXT_LENGTH]} …" for text in texts]
    reward = document.get("reward")
    is_number = isinstance(reward, int | float) and abs(reward) < 1e9
    cells = [("span.text transcript", text) for text in texts]
    return [when, *cells, format_number(reward if is_number else None)]


def sample_transcripts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first questions of the last step, each after its answer at the first step that has it."""

    def when(row: dict[str, Any]) -> tuple[Any, Any]:
        return row.get("step"), row.get("phase")

    def question(row: dict[str, Any]) -> tuple[Any, Any]:
        return row.get("phase"), row.get("prompt")

    found = []
    for end in [row for row in rows if when(row) == when(rows[-1])][:MAX_TRANSCRIPTS]:
        first = next(row for row in rows if question(row) == question(end))
        found += [first, end] if first is not end else [end]
    return found


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
    began = _format_time(created) if isinstance(created, int | float) else "–"
    took = format_number(seconds if isinstance(seconds, int | float) else None)
    origin = [("code", str(run.row.get(key) or "–")[:12]) for key in ("commit", "code")]
    return [("code", run.id), label, "–" if run.seed is None else run.seed, run.state, began, took, *origin]


def _format_time(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "–"


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
        "settings": len(report.settings),
        "runs": len(states),
        "state": ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
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

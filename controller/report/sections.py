"""Sections of the page: curves with comparisons, time and cost, transcripts."""

from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

from controller.core.text import format_number as format_result
from controller.core.text import plural
from controller.report.contents import SPAN_KINDS, ReportModel, Timeline
from controller.report.curves import is_preferred
from controller.report.drawing import (
    Row,
    add_child,
    add_table,
    add_text,
    colour,
    difference_cells,
    format_duration,
    format_number,
    format_time,
    line_chart,
)
from controller.report.gather import RESULT_FILE, Metric

MAX_TRANSCRIPT_RUNS, MAX_TEXT_LENGTH = 24, 2000
MAX_ALERTS = 100
COMPARED = (
    ", the baseline, with 95 % intervals. paired: Student's t of the differences between runs with the same seed; "
    "Welch: Welch's t, where fewer than two seeds are in both. Both assume normal distributions, hold for a single "
    "comparison, and are wide with few seeds (arXiv:1904.06979). There is no interval where all differences are equal."
)
COMPARISON_COLUMNS = ("#difference", "95 % interval", "how")


def metrics_section(section: Element, report: ReportModel) -> None:
    """Add the curves: of one setting side by side, of several with the comparison of the settings below each."""
    if not report.metrics:
        add_text(section, "No run has metrics.jsonl or summary.json.", class_="soft")
        return
    shown = [metric for metric in report.metrics if metric not in report.constants]
    if len(report.runs) == 1:
        add_text(section, "A band is the interval that the run told. A vertical stroke marks an interruption.")
    else:
        add_text(
            section,
            "Each line is the mean over the seeds of a setting; its band spans the lowest to the highest seed. A "
            "vertical stroke marks an interruption. The tables show the last value of each finished run",
            *((" and the difference from ", ("b", report.settings[0].label), COMPARED) if report.settings[1:] else "."),
        )
    if report.settings[1:]:
        _add_comparisons(section, report, shown)
    else:
        _add_groups(section, report, shown)
    if report.constants:
        named = ", ".join(f"{phase} {name} {format_result(value)}" for (phase, name), value in report.constants.items())
        add_text(section, f"The same at every step of every run: {named}.", class_="soft")
    if report.omitted_metrics:
        add_text(section, f"{plural(report.omitted_metrics, 'further metric')} left out.", class_="soft")


def _add_groups(section: Element, report: ReportModel, metrics: Sequence[Metric]) -> None:
    """Add a fold for each phase, or each prefix before a slash where there is none, with small charts and a table."""
    groups: dict[str, list[Metric]] = {}
    for metric in metrics:
        groups.setdefault(metric[0] or "/".join(metric[1].split("/")[:-1]), []).append(metric)
    for i, (name, members) in enumerate(groups.items()):
        fold = add_child(section, "details", open=i == 0)
        count = plural(len(members), "metric")
        add_child(fold, "summary", f"{name}: {count}" if name else count)
        add_charts(add_child(fold, "div", class_="charts" if len(members) > 2 else None), report, members)
        alone = len(report.runs) == 1
        rows: list[Row] = []
        for metric in members:
            [one] = report.comparisons(metric)
            spread = () if alone else (format_number(one.deviation, by=one.deviation), one.n)
            rows.append([metric[1], format_number(one.mean, by=one.deviation), *spread])
        head = ["metric", "#last value"] if alone else ["metric", "#mean", "#± std", "#seeds"]
        add_table(fold, f"{name or 'metrics'}, last value of each run", head, rows)
        _add_unfinished(fold, report, members)


def add_charts(parent: Element, report: ReportModel, metrics: Sequence[Metric]) -> None:
    """Add a small chart of each metric that has curves."""
    for metric in metrics:
        if curves := report.curves(metric):
            figure = add_child(parent, "figure")
            add_child(figure, "figcaption", metric[1])
            line_chart(figure, metric[1], curves, report.interrupted_steps(metric))


def _add_comparisons(section: Element, report: ReportModel, metrics: Sequence[Metric]) -> None:
    """Add a fold for each metric, with its curves and the differences from the baseline."""
    phase = ""
    for i, metric in enumerate(metrics):
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
        head = ["setting", "#mean", *COMPARISON_COLUMNS, "#± std", "#seeds"]
        add_table(fold, f"{name}, {caption}", head, _comparison_rows(report, metric))
        _add_unfinished(fold, report, [metric])


def _add_unfinished(fold: Element, report: ReportModel, metrics: Sequence[Metric]) -> None:
    for metric in metrics:
        if missing := report.runs_without_end(metric):
            named = "; ".join(map(report.run_label, missing))
            told = f"In no mean of {metric[1]}, since their last value is not finite: {named}."
            add_text(fold, told, class_="soft")


def _comparison_rows(report: ReportModel, metric: Metric) -> list[Row]:
    compared = report.comparisons(metric)
    rows: list[Row] = []
    for i, (setting, one) in enumerate(zip(report.settings, compared, strict=True)):
        seeds = f"{one.n}" if one.n == len(setting.runs) else f"{one.n} of {len(setting.runs)}"
        mean, deviation = (format_number(value, by=one.deviation) for value in (one.mean, one.deviation))
        label = (f"span.{colour(i)}", setting.label)
        if i == 0:
            rows.append([label, mean, "baseline", "", "", deviation, seeds])
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
            add_text(listed, ("b", report.run_label(run)), f", {format_time(mark.time)} UTC: {mark.message}", tag="li")
    raised = [(run, alert) for run, time in zip(report.runs, times, strict=True) for alert in time.alerts]
    if raised:
        add_child(section, "h3", "Alerts")
        listed = add_child(section, "ul")
        for run, alert in raised[:MAX_ALERTS]:
            ended = "" if alert.ended is None else f", over after {format_duration(alert.ended - alert.time)}"
            said = f", {format_time(alert.time)} UTC{ended}: "
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
        count = f"{len(run.transcripts)} of {plural(run.num_transcripts, 'transcript')}"
        add_child(fold, "summary", f"{report.run_label(run)}: {count}")
        rows = [_transcript_row(document) for document in run.transcripts]
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

"""The parts of the page, each a section with a heading."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from xml.etree.ElementTree import Element

from controller.core.text import plural
from controller.report.drawing import (
    COLOURS,
    format_duration,
    format_number,
    legend_square,
    swatch,
    timeline_bar,
    whisker,
)
from controller.report.gather import RESULT_FILE, Metric, RecordedRun
from controller.report.markup import add_child, printable_text
from controller.report.model import ReportModel
from controller.report.timeline import SPAN_KINDS, Timeline

MAX_TRANSCRIPT_RUNS, MAX_TRANSCRIPTS, MAX_TEXT_LENGTH = 24, 4, 700
TRANSCRIPT_COLUMNS = ("prompt", "response", "extracted", "answer", "reward")


def add_section(main: Element, name: str, title: str) -> Element:
    found = add_child(main, "section", id=name, aria_labelledby=f"{name}-title")
    add_child(found, "h2", title, id=f"{name}-title")
    return found


def add_table(parent: Element, head: Sequence[str], label: str, **attributes: object) -> Element:
    """A table that scrolls by itself where it is too wide, by keys too; returns it. `#…` heads a column of numbers."""
    around = add_child(parent, "div", class_="scroll", tabindex=0, role="region", aria_label=label)
    found = add_child(around, "table", **attributes)
    row = add_child(add_child(found, "thead"), "tr")
    for words in head:
        add_child(row, "th", words.removeprefix("#"), scope="col", class_="number" if words.startswith("#") else None)
    return found


def metric_name(metric: Metric) -> str:
    return f"{metric[0]}: {metric[1]}" if metric[0] else metric[1]


def curves_section(main: Element, study: ReportModel) -> None:
    """What page.js draws into, with its controls; the lines are a table, whose values it fills in."""
    found = add_section(main, "curves", "Learning curves")
    if not study.metrics:
        add_child(found, "p", "No run has left metrics.jsonl or summary.json.", class_="soft")
        return
    controls = add_child(found, "div", class_="controls")
    add_child(controls, "label", "Metric", for_="metric")
    choice = add_child(controls, "select", id="metric", autocomplete="off")
    for phase in dict.fromkeys(phase for phase, _ in study.metrics):
        group = add_child(choice, "optgroup", label=phase or "no phase")
        for i, metric in enumerate(study.metrics):
            if metric[0] == phase:
                add_child(group, "option", metric[1], value=i, select_runs=i == 0)
    if study.omitted_metrics:
        add_child(controls, "span", f"{study.omitted_metrics} further ones are left out", class_="soft")
    log = add_child(controls, "label")
    add_child(log, "input", type="checkbox", id="log", autocomplete="off")
    log[0].tail = " logarithmic"
    figure = add_child(found, "figure")
    add_child(figure, "div", id="chart")
    nothing = "No curve of this metric: a number at the end of each run, or no line that is shown has it."
    add_child(figure, "p", nothing, id="nothing", class_="soft", hidden=True)
    add_child(
        add_child(figure, "noscript"), "p", "The curves are drawn by a script of this page; the tables below need none."
    )
    slider = add_child(figure, "div", class_="slider")
    label = add_child(slider, "label", "Step ", for_="step")
    add_child(label, "output", "–", id="at", for_="step")
    add_child(slider, "input", type="range", id="step", min=0, max=0, value=0, autocomplete="off")
    words = "A line is the mean over the seeds of a setting, its band goes from the lowest to the highest of them."
    add_child(figure, "figcaption", words)
    lines = add_table(
        found, ["setting", "#mean at the step", "#lowest to highest", "#runs"], "Lines of the chart", id="lines"
    )
    body = add_child(lines, "tbody")
    for i, setting in enumerate(study.settings):
        row = add_child(body, "tr")
        label = add_child(add_child(row, "th", scope="row"), "label")
        add_child(label, "input", type="checkbox", checked=i < COLOURS, autocomplete="off")
        swatch(label, i)
        add_child(label, "span", setting.label)
        add_child(row, "td", "–", class_="number")
        add_child(row, "td", "–", class_="number")
        add_child(row, "td", len(setting.counted), class_="number")


def ablation_section(main: Element, study: ReportModel) -> None:
    """A table for each metric; page.js shows that of the chosen one."""
    found = add_section(main, "ablation", "Settings compared")
    if not study.metrics:
        add_child(found, "p", "There are no numbers to compare.", class_="soft")
        return
    words = add_child(found, "p", "Differences to ")
    add_child(words, "b", study.settings[0].label)
    words[0].tail = ", the baseline, by the last value of each run that has finished."
    for i, metric in enumerate(study.metrics):
        part = add_child(found, "div", data_metric=i, hidden=i > 0)
        _comparison_table(part, study, metric)
    notes = add_child(found, "p", class_="soft")
    notes.text = (
        "95 % intervals. paired: Student's t of the differences of runs with the same seed. Welch: two samples of "
        "unequal spread, where fewer than two seeds are in both (B. L. Welch, Biometrika 34, 1947). They suppose runs "
        "that are spread like a bell, hold for one comparison each, are not corrected for how many there are, and with "
        "few seeds are wide: see "
    )
    add_child(notes, "a", "Colas, Sigaud, Oudeyer 2019", href="https://arxiv.org/abs/1904.06979", rel="noreferrer")
    notes[0].tail = ". Where all differences are the same, no interval can be told."


def _comparison_table(parent: Element, study: ReportModel, metric: Metric) -> None:
    rows = study.table(metric)
    head = ["setting", "#seeds", "#mean", "#± std", "#difference", "95 % interval", "", "how"]
    whole = add_table(parent, head, f"Settings compared by {metric_name(metric)}")
    caption = "at the end of each run" if metric[0] == RESULT_FILE else "the last value of each run"
    title = add_child(whole, "caption")
    add_child(title, "b", metric_name(metric))
    title[0].tail = f", {caption}"
    whole.remove(title)
    whole.insert(0, title)
    edges = [0.0, *(v for one in rows for v in (one.low, one.high, one.difference) if v is not None)]
    body = add_child(whole, "tbody")
    for i, (setting, one) in enumerate(zip(study.settings, rows, strict=True)):
        row = add_child(body, "tr", class_="baseline" if i == 0 else None)
        cell = add_child(row, "th", scope="row")
        swatch(cell, i)
        add_child(cell, "span", setting.label)
        of = "" if one.n == len(setting.runs) else f" of {len(setting.runs)}"
        add_child(row, "td", f"{one.n}{of}", class_="number")
        add_child(row, "td", format_number(one.mean, by=one.deviation), class_="number")
        add_child(row, "td", format_number(one.deviation, by=one.deviation), class_="number")
        if i == 0:
            add_child(row, "td", "baseline", colspan=4, class_="soft")
            continue
        sure, width = " differs" if one.differs else "", None
        if one.low is not None and one.high is not None:
            width = one.high - one.low
        low, difference, high = (format_number(v, sign=True, by=width) for v in (one.low, one.difference, one.high))
        add_child(row, "td", difference, class_=f"number{sure}")
        interval = f"{low} to {high}" if width is not None else "–"
        add_child(row, "td", interval, class_=sure.strip() or None)
        whisker(add_child(row, "td"), one, min(edges), max(edges))
        add_child(row, "td", f"{one.how}, {plural(one.pairs, 'pair')}" if one.how == "paired" else one.how or "–")


def time_section(main: Element, study: ReportModel) -> None:
    """Where the time of each run went, what it cost, and what interrupted it."""
    found = add_section(main, "time", "Time and cost")
    kinds = [kind for kind in SPAN_KINDS if any(time.of(kind) for time in study.times.values())]
    keys = add_child(found, "ul", class_="kinds")
    for kind in kinds:
        item = add_child(keys, "li")
        legend_square(item, kind)
        add_child(item, "b", kind)
        add_child(item, "span", SPAN_KINDS[kind])
    head = [
        "setting",
        "#seed",
        "time line",
        *(f"#{kind}" for kind in kinds),
        "#attempts",
        "#goodput",
        "#pod hours",
        "#USD",
    ]
    whole = add_table(found, head, "Time and cost of each run")
    longest = max((time.seconds for time in study.times.values()), default=0.0)
    body = add_child(whole, "tbody")
    for run in study.runs:
        row = add_child(body, "tr")
        add_child(row, "th", study.setting(run).label, scope="row")
        add_child(row, "td", "–" if run.seed is None else run.seed, class_="number")
        _time_row(row, study.times[run.id], kinds, longest)
    _totals_row(add_child(add_child(whole, "tfoot"), "tr"), [study.times[run.id] for run in study.runs], kinds)
    words = (
        "goodput: the time of updates and evaluations that count, by the time that the run had its pods. A stroke in a "
        "time line is an interruption. Pod hours and USD are those on record at the end of each run, at list prices; a "
        "dash: nothing is billed, or the price is not known."
    )
    add_child(found, "p", words, class_="soft")
    marks = [(run, mark) for run in study.runs for mark in study.times[run.id].marks]
    if marks:
        add_child(found, "h3", "Interruptions")
        listed = add_child(found, "ul")
        for run, mark in marks:
            item = add_child(listed, "li")
            add_child(item, "b", study.label(run))
            item[0].tail = printable_text(f", {_format_time(mark.time)} UTC: {mark.words}")


def _time_row(row: Element, time: Timeline, kinds: Sequence[str], longest: float) -> None:
    words = (
        ", ".join(f"{kind} {format_duration(time.of(kind))}" for kind in kinds if time.of(kind))
        or "nothing is on record"
    )
    timeline_bar(add_child(row, "td"), time, longest, words)
    for kind in kinds:
        add_child(row, "td", format_duration(time.of(kind)) if time.of(kind) else "–", class_="number")
    _cost_cells(row, time.attempts, time.goodput, time.pod_hours, time.usd)


def _totals_row(row: Element, times: Sequence[Timeline], kinds: Sequence[str]) -> None:
    add_child(row, "th", "all", scope="row", colspan=3)
    for kind in kinds:
        add_child(row, "td", format_duration(sum(time.of(kind) for time in times)), class_="number")
    hours = [time.pod_hours for time in times if time.pod_hours is not None]
    dollars = [time.usd for time in times if time.usd is not None]
    useful = [time for time in times if time.goodput is not None]
    paid = sum(3600 * time.pod_hours if time.pod_hours else time.seconds for time in useful)
    goodput = sum(time.of("training") for time in useful) / paid if paid else None
    _cost_cells(
        row, sum(time.attempts for time in times), goodput, sum(hours) or None, sum(dollars) if dollars else None
    )


def _cost_cells(row: Element, attempts: int, goodput: float | None, hours: float | None, usd: float | None) -> None:
    add_child(row, "td", attempts or "–", class_="number")
    add_child(row, "td", "–" if goodput is None else f"{100 * goodput:.0f} %", class_="number")
    add_child(row, "td", "–" if hours is None else f"{hours:.2f}", class_="number")
    add_child(row, "td", "–" if usd is None else f"{usd:,.2f}", class_="number")


def transcripts_section(main: Element, study: ReportModel) -> None:
    """Of each run some questions, with what was answered first and last."""
    having = [run for run in study.runs if run.transcripts]
    found = add_section(main, "transcripts", "Sample transcripts")
    if not having:
        add_child(found, "p", "No run has left transcripts.jsonl on this machine.", class_="soft")
        return
    for run in having[:MAX_TRANSCRIPT_RUNS]:
        details = add_child(found, "details", class_="transcripts")
        add_child(details, "summary", f"{study.label(run)}: {plural(len(run.transcripts), 'transcript')}")
        _transcripts_of_run(details, study.label(run), run)
    if (rest := len(having) - MAX_TRANSCRIPT_RUNS) > 0:
        add_child(found, "p", f"{rest} further runs have transcripts.jsonl.", class_="soft")


def _transcripts_of_run(parent: Element, label: str, run: RecordedRun) -> None:
    whole = add_table(
        parent, ["step", "prompt", "response", "taken as", "right answer", "#reward"], f"Transcripts of {label}"
    )
    body = add_child(whole, "tbody")
    for document in sample_transcripts(run.transcripts):
        row = add_child(body, "tr")
        step, phase = (str(document.get(key, ""))[:40] for key in ("step", "phase"))
        add_child(row, "th", f"{step} {phase}", scope="row")
        for key in TRANSCRIPT_COLUMNS:
            value = document.get(key)
            if key == "reward":
                reward = value if isinstance(value, int | float) and abs(value) < 1e9 else None
                add_child(
                    row, "td", format_number(reward), class_=f"number {'right' if reward and reward > 0 else 'wrong'}"
                )
            else:
                long = " long" if key in ("prompt", "response") else ""
                add_child(row, "td", "nothing" if value is None else _truncate(str(value)), class_=f"text{long}")


def sample_transcripts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first questions of the last step, each with what was answered to it at the first one."""
    ends = [row for row in rows if _step_key(row) == _step_key(rows[-1])][:MAX_TRANSCRIPTS]
    found = []
    for end in ends:
        first = next(row for row in rows if _question_key(row) == _question_key(end))
        found += [first, end] if first is not end else [end]
    return found


def runs_section(main: Element, study: ReportModel) -> None:
    """What leads back from a number to its config and code."""
    found = add_section(main, "runs", "Runs")
    words = add_child(found, "p", "Each number leads back to a record: ")
    add_child(words, "code", "slipway runs --diff A B")
    words[0].tail = " says what differs between two runs, "
    add_child(words, "code", "slipway up --run ID")
    words[1].tail = " repeats one, code and data included."
    head = ["run", "setting", "#seed", "state", "began (UTC)", "#seconds", "commit", "code"]
    body = add_child(add_table(found, head, "Runs"), "tbody")
    for run in [*study.runs, *study.left_out]:
        row = add_child(body, "tr")
        add_child(row, "th", run.id, scope="row", class_="id")
        label = study.setting(run).label
        add_child(row, "td", label if run not in study.left_out else f"{label} (left out: the seed has a later run)")
        add_child(row, "td", "–" if run.seed is None else run.seed, class_="number")
        add_child(row, "td", run.state)
        created, seconds = run.row.get("created"), run.row.get("seconds")
        add_child(row, "td", _format_time(created) if isinstance(created, int | float) else "–")
        add_child(row, "td", format_number(seconds if isinstance(seconds, int | float) else None), class_="number")
        for key in ("commit", "code"):
            add_child(row, "td", str(run.row.get(key) or "–")[:12], class_="id")


def _step_key(row: dict[str, Any]) -> tuple[Any, Any]:
    return row.get("step"), row.get("phase")


def _question_key(row: dict[str, Any]) -> tuple[Any, Any]:
    return row.get("phase"), row.get("prompt")


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[:MAX_TEXT_LENGTH]} …"


def _format_time(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "–"

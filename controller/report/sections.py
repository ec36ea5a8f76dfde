"""The parts of the page, each a section with a heading."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from xml.etree.ElementTree import Element

from controller.core.text import counted
from controller.report.drawing import COLOURS, bar, length, number, square, swatch, whisker
from controller.report.gather import RESULT, Metric, Run
from controller.report.markup import add, shown
from controller.report.model import Study
from controller.report.timeline import KINDS, Timeline

MOST_RUNS_OF_TRANSCRIPTS, MOST_TRANSCRIPTS, LONGEST_TEXT = 24, 4, 700
TRANSCRIPT = ("prompt", "response", "extracted", "answer", "reward")


def section(main: Element, name: str, title: str) -> Element:
    found = add(main, "section", id=name, aria_labelledby=f"{name}-title")
    add(found, "h2", title, id=f"{name}-title")
    return found


def table(parent: Element, head: Sequence[str], label: str, **attributes: object) -> Element:
    """A table that scrolls by itself where it is too wide, by keys too; returns it. `#…` heads a column of numbers."""
    around = add(parent, "div", class_="scroll", tabindex=0, role="region", aria_label=label)
    found = add(around, "table", **attributes)
    row = add(add(found, "thead"), "tr")
    for words in head:
        add(row, "th", words.removeprefix("#"), scope="col", class_="number" if words.startswith("#") else None)
    return found


def name_of(metric: Metric) -> str:
    return f"{metric[0]}: {metric[1]}" if metric[0] else metric[1]


def curves(main: Element, study: Study) -> None:
    """What page.js draws into, with its controls; the lines are a table, whose values it fills in."""
    found = section(main, "curves", "Learning curves")
    if not study.metrics:
        add(found, "p", "No run has left metrics.jsonl or summary.json.", class_="soft")
        return
    controls = add(found, "div", class_="controls")
    add(controls, "label", "Metric", for_="metric")
    choice = add(controls, "select", id="metric", autocomplete="off")
    for phase in dict.fromkeys(phase for phase, _ in study.metrics):
        group = add(choice, "optgroup", label=phase or "no phase")
        for i, metric in enumerate(study.metrics):
            if metric[0] == phase:
                add(group, "option", metric[1], value=i, selected=i == 0)
    if study.further_metrics:
        add(controls, "span", f"{study.further_metrics} further ones are left out", class_="soft")
    log = add(controls, "label")
    add(log, "input", type="checkbox", id="log", autocomplete="off")
    log[0].tail = " logarithmic"
    figure = add(found, "figure")
    add(figure, "div", id="chart")
    nothing = "No curve of this metric: a number at the end of each run, or no line that is shown has it."
    add(figure, "p", nothing, id="nothing", class_="soft", hidden=True)
    add(add(figure, "noscript"), "p", "The curves are drawn by a script of this page; the tables below need none.")
    slider = add(figure, "div", class_="slider")
    label = add(slider, "label", "Step ", for_="step")
    add(label, "output", "–", id="at", for_="step")
    add(slider, "input", type="range", id="step", min=0, max=0, value=0, autocomplete="off")
    words = "A line is the mean over the seeds of a setting, its band goes from the lowest to the highest of them."
    add(figure, "figcaption", words)
    lines = table(
        found, ["setting", "#mean at the step", "#lowest to highest", "#runs"], "Lines of the chart", id="lines"
    )
    body = add(lines, "tbody")
    for i, setting in enumerate(study.settings):
        row = add(body, "tr")
        label = add(add(row, "th", scope="row"), "label")
        add(label, "input", type="checkbox", checked=i < COLOURS, autocomplete="off")
        swatch(label, i)
        add(label, "span", setting.label)
        add(row, "td", "–", class_="number")
        add(row, "td", "–", class_="number")
        add(row, "td", len(setting.counted), class_="number")


def ablation(main: Element, study: Study) -> None:
    """A table for each metric; page.js shows that of the chosen one."""
    found = section(main, "ablation", "Settings compared")
    if not study.metrics:
        add(found, "p", "There are no numbers to compare.", class_="soft")
        return
    words = add(found, "p", "Differences to ")
    add(words, "b", study.settings[0].label)
    words[0].tail = ", the baseline, by the last value of each run that has finished."
    for i, metric in enumerate(study.metrics):
        part = add(found, "div", data_metric=i, hidden=i > 0)
        _comparison(part, study, metric)
    notes = add(found, "p", class_="soft")
    notes.text = (
        "95 % intervals. paired: Student's t of the differences of runs with the same seed. Welch: two samples of "
        "unequal spread, where fewer than two seeds are in both (B. L. Welch, Biometrika 34, 1947). They suppose runs "
        "that are spread like a bell, hold for one comparison each, are not corrected for how many there are, and with "
        "few seeds are wide: see "
    )
    add(notes, "a", "Colas, Sigaud, Oudeyer 2019", href="https://arxiv.org/abs/1904.06979", rel="noreferrer")
    notes[0].tail = ". Where all differences are the same, no interval can be told."


def _comparison(parent: Element, study: Study, metric: Metric) -> None:
    rows = study.table(metric)
    head = ["setting", "#seeds", "#mean", "#± std", "#difference", "95 % interval", "", "how"]
    whole = table(parent, head, f"Settings compared by {name_of(metric)}")
    caption = "at the end of each run" if metric[0] == RESULT else "the last value of each run"
    title = add(whole, "caption")
    add(title, "b", name_of(metric))
    title[0].tail = f", {caption}"
    whole.remove(title)
    whole.insert(0, title)
    edges = [0.0, *(v for one in rows for v in (one.low, one.high, one.difference) if v is not None)]
    body = add(whole, "tbody")
    for i, (setting, one) in enumerate(zip(study.settings, rows, strict=True)):
        row = add(body, "tr", class_="baseline" if i == 0 else None)
        cell = add(row, "th", scope="row")
        swatch(cell, i)
        add(cell, "span", setting.label)
        of = "" if one.n == len(setting.runs) else f" of {len(setting.runs)}"
        add(row, "td", f"{one.n}{of}", class_="number")
        add(row, "td", number(one.mean, by=one.deviation), class_="number")
        add(row, "td", number(one.deviation, by=one.deviation), class_="number")
        if i == 0:
            add(row, "td", "baseline", colspan=4, class_="soft")
            continue
        sure, width = " differs" if one.differs else "", None
        if one.low is not None and one.high is not None:
            width = one.high - one.low
        low, difference, high = (number(v, sign=True, by=width) for v in (one.low, one.difference, one.high))
        add(row, "td", difference, class_=f"number{sure}")
        interval = f"{low} to {high}" if width is not None else "–"
        add(row, "td", interval, class_=sure.strip() or None)
        whisker(add(row, "td"), one, min(edges), max(edges))
        add(row, "td", f"{one.how}, {counted(one.pairs, 'pair')}" if one.how == "paired" else one.how or "–")


def time(main: Element, study: Study) -> None:
    """Where the time of each run went, what it cost, and what interrupted it."""
    found = section(main, "time", "Time and cost")
    kinds = [kind for kind in KINDS if any(time.of(kind) for time in study.times.values())]
    keys = add(found, "ul", class_="kinds")
    for kind in kinds:
        item = add(keys, "li")
        square(item, kind)
        add(item, "b", kind)
        add(item, "span", KINDS[kind])
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
    whole = table(found, head, "Time and cost of each run")
    longest = max((time.seconds for time in study.times.values()), default=0.0)
    body = add(whole, "tbody")
    for run in study.runs:
        row = add(body, "tr")
        add(row, "th", study.setting(run).label, scope="row")
        add(row, "td", "–" if run.seed is None else run.seed, class_="number")
        _time_row(row, study.times[run.id], kinds, longest)
    _totals(add(add(whole, "tfoot"), "tr"), [study.times[run.id] for run in study.runs], kinds)
    words = (
        "goodput: the time of updates and evaluations that count, by the time that the run had its pods. A stroke in a "
        "time line is an interruption. Pod hours and USD are those on record at the end of each run, at list prices; a "
        "dash: nothing is billed, or the price is not known."
    )
    add(found, "p", words, class_="soft")
    marks = [(run, mark) for run in study.runs for mark in study.times[run.id].marks]
    if marks:
        add(found, "h3", "Interruptions")
        listed = add(found, "ul")
        for run, mark in marks:
            item = add(listed, "li")
            add(item, "b", study.label(run))
            item[0].tail = shown(f", {_clock(mark.time)} UTC: {mark.words}")


def _time_row(row: Element, time: Timeline, kinds: Sequence[str], longest: float) -> None:
    words = ", ".join(f"{kind} {length(time.of(kind))}" for kind in kinds if time.of(kind)) or "nothing is on record"
    bar(add(row, "td"), time, longest, words)
    for kind in kinds:
        add(row, "td", length(time.of(kind)) if time.of(kind) else "–", class_="number")
    _cost(row, time.attempts, time.goodput, time.pod_hours, time.usd)


def _totals(row: Element, times: Sequence[Timeline], kinds: Sequence[str]) -> None:
    add(row, "th", "all", scope="row", colspan=3)
    for kind in kinds:
        add(row, "td", length(sum(time.of(kind) for time in times)), class_="number")
    hours = [time.pod_hours for time in times if time.pod_hours is not None]
    dollars = [time.usd for time in times if time.usd is not None]
    useful = [time for time in times if time.goodput is not None]
    paid = sum(3600 * time.pod_hours if time.pod_hours else time.seconds for time in useful)
    goodput = sum(time.of("training") for time in useful) / paid if paid else None
    _cost(row, sum(time.attempts for time in times), goodput, sum(hours) or None, sum(dollars) if dollars else None)


def _cost(row: Element, attempts: int, goodput: float | None, hours: float | None, usd: float | None) -> None:
    add(row, "td", attempts or "–", class_="number")
    add(row, "td", "–" if goodput is None else f"{100 * goodput:.0f} %", class_="number")
    add(row, "td", "–" if hours is None else f"{hours:.2f}", class_="number")
    add(row, "td", "–" if usd is None else f"{usd:,.2f}", class_="number")


def transcripts(main: Element, study: Study) -> None:
    """Of each run some questions, with what was answered first and last."""
    having = [run for run in study.runs if run.transcripts]
    found = section(main, "transcripts", "Sample transcripts")
    if not having:
        add(found, "p", "No run has left transcripts.jsonl on this machine.", class_="soft")
        return
    for run in having[:MOST_RUNS_OF_TRANSCRIPTS]:
        details = add(found, "details", class_="transcripts")
        add(details, "summary", f"{study.label(run)}: {counted(len(run.transcripts), 'transcript')}")
        _answers(details, study.label(run), run)
    if (rest := len(having) - MOST_RUNS_OF_TRANSCRIPTS) > 0:
        add(found, "p", f"{rest} further runs have transcripts.jsonl.", class_="soft")


def _answers(parent: Element, label: str, run: Run) -> None:
    whole = table(
        parent, ["step", "prompt", "response", "taken as", "right answer", "#reward"], f"Transcripts of {label}"
    )
    body = add(whole, "tbody")
    for document in sampled(run.transcripts):
        row = add(body, "tr")
        step, phase = (str(document.get(key, ""))[:40] for key in ("step", "phase"))
        add(row, "th", f"{step} {phase}", scope="row")
        for key in TRANSCRIPT:
            value = document.get(key)
            if key == "reward":
                reward = value if isinstance(value, int | float) and abs(value) < 1e9 else None
                add(row, "td", number(reward), class_=f"number {'right' if reward and reward > 0 else 'wrong'}")
            else:
                long = " long" if key in ("prompt", "response") else ""
                add(row, "td", "nothing" if value is None else _cut(str(value)), class_=f"text{long}")


def sampled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first questions of the last step, each with what was answered to it at the first one."""
    ends = [row for row in rows if _when(row) == _when(rows[-1])][:MOST_TRANSCRIPTS]
    found = []
    for end in ends:
        first = next(row for row in rows if _question(row) == _question(end))
        found += [first, end] if first is not end else [end]
    return found


def runs(main: Element, study: Study) -> None:
    """What leads back from a number to its config and code."""
    found = section(main, "runs", "Runs")
    words = add(found, "p", "Each number leads back to a record: ")
    add(words, "code", "slipway runs --diff A B")
    words[0].tail = " says what differs between two runs, "
    add(words, "code", "slipway up --run ID")
    words[1].tail = " repeats one, code and data included."
    head = ["run", "setting", "#seed", "state", "began (UTC)", "#seconds", "commit", "code"]
    body = add(table(found, head, "Runs"), "tbody")
    for run in [*study.runs, *study.left_out]:
        row = add(body, "tr")
        add(row, "th", run.id, scope="row", class_="id")
        label = study.setting(run).label
        add(row, "td", label if run not in study.left_out else f"{label} (left out: the seed has a later run)")
        add(row, "td", "–" if run.seed is None else run.seed, class_="number")
        add(row, "td", run.state)
        created, seconds = run.row.get("created"), run.row.get("seconds")
        add(row, "td", _clock(created) if isinstance(created, int | float) else "–")
        add(row, "td", number(seconds if isinstance(seconds, int | float) else None), class_="number")
        for key in ("commit", "code"):
            add(row, "td", str(run.row.get(key) or "–")[:12], class_="id")


def _when(row: dict[str, Any]) -> tuple[Any, Any]:
    return row.get("step"), row.get("phase")


def _question(row: dict[str, Any]) -> tuple[Any, Any]:
    return row.get("phase"), row.get("prompt")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} …"


def _clock(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "–"

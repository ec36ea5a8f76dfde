"""The contents of a report as values: timelines, comparisons, what curves show; `--json` prints them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from controller.report.comparison import Asked, Comparison, Setting, compare, group_by_hypothesis, summarize
from controller.report.curves import Curve, build_curve, points_per_curve, select_metrics, smooth
from controller.report.gather import Metric, MetricsLine, RecordedRun

SPAN_KINDS: Mapping[str, str] = {
    "provisioning": "pod creation, worker setup, launch",
    "starting": "start and compile: from the launch to the first update",
    "training": "updates and evaluations that count",
    "lost": "from the last update that was kept until the response to the failure",
    "recovery": "from that response to the launch of the next attempt",
    "closing": "last evaluation and upload, until the result is recorded",
    "running": "a program that reports no steps",
}


FINAL_SPAN_KIND = {"finished": "closing", "running": "training"}
"""Kind of span after the last metrics line of the last attempt, by the state of the run."""


@dataclass(frozen=True)
class Span:
    """A period of one kind; times in seconds since the epoch."""

    kind: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Interruption:
    time: float
    message: str


@dataclass(frozen=True)
class RaisedAlert:
    """An alert of the run: its time, its name, what it said, and when it was over; None if its attempt was cut off."""

    time: float
    name: str
    message: str
    ended: float | None = None


@dataclass(frozen=True)
class Timeline:
    """Timeline of a run. `pod_hours` and `usd` are as recorded at the run's end; None if unknown."""

    spans: tuple[Span, ...]
    interruptions: tuple[Interruption, ...]
    attempts: int
    pod_hours: float | None
    usd: float | None
    alerts: tuple[RaisedAlert, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(span.seconds for span in self.spans)

    def seconds_of(self, kind: str) -> float:
        return sum(span.seconds for span in self.spans if span.kind == kind)

    @property
    def goodput(self) -> float | None:
        """Useful training time divided by pod time; None where the program reports no steps."""
        paid = 3600 * self.pod_hours if self.pod_hours else self.seconds
        return min(1.0, self.seconds_of("training") / paid) if paid and self.seconds_of("training") else None


@dataclass
class _Attempt:
    launched: float
    ended: float | None = None


def build_timeline(run: RecordedRun) -> Timeline:
    """Return the timeline of one run; empty if nothing was recorded."""
    attempts, marks = _attempts(run.events)
    began, ended = _time_bounds(run)
    created = run.row.get("created")
    if not attempts and isinstance(created, int | float):  # the record is made at the first launch
        attempts = [_Attempt(created)]
    row = {key: run.row.get(key) for key in ("pod_hours", "usd")}
    cost = [value if isinstance(value, int | float) else None for value in row.values()]
    spans: list[Span] = []
    at, step = began, 0.0
    for i, attempt in enumerate(attempts):
        following = attempts[i + 1].launched if i + 1 < len(attempts) else None
        start = min(max(attempt.launched, at), ended)
        spans.append(Span("recovery" if i else "provisioning", at, start))
        end = min(max(attempt.ended or following or ended, start), ended)
        found = [line for line in run.lines if start <= line.time <= end]
        state = run.state if following is None and attempt.ended is None else "lost"
        spans += (
            _attempt_spans(found, start, end, step, FINAL_SPAN_KIND.get(state, "lost"))
            if run.lines
            else [Span("running", start, end)]
        )
        at, step = end, max([step, *(line.step for line in found)])
    if at < ended:
        spans.append(Span("recovery" if attempts else "provisioning", at, ended))
    kept = tuple(span for span in spans if span.seconds > 0)
    count = len(attempts) or int(run.row.get("attempts") or 0)
    return Timeline(kept, tuple(marks), count, cost[0], cost[1], tuple(_alerts(run.events)))


def _attempt_spans(lines: Sequence[MetricsLine], start: float, end: float, step: float, after: str) -> list[Span]:
    """Return the spans of one attempt, which began after update `step`; a metrics line covers the updates before it."""
    if not lines:
        return [Span("lost" if after == "lost" else "starting", start, end)]
    first = lines[0]
    updates = max(1.0, first.step - step)
    trains = max(start, first.time - (first.step_time * updates if first.step_time else 0.0))
    last = lines[-1].time
    return [Span("starting", start, trains), Span("training", trains, last), Span(after, last, end)]


def _attempts(events: Sequence[dict[str, Any]]) -> tuple[list[_Attempt], list[Interruption]]:
    """Return each attempt with its launch and loss, and the interruptions of the run."""
    found: dict[int, _Attempt] = {}
    marks = []
    for event in events:
        number = event.get("attempt")
        if event.get("kind") != "note" or not isinstance(number, int):
            continue
        if "verdict" in event:
            marks.append(Interruption(event["time"], str(event.get("message", ""))))
            if number in found:
                found[number].ended = event["time"]
        else:
            found.setdefault(number, _Attempt(event["time"]))
    return [found[number] for number in sorted(found)], marks


def _alerts(events: Sequence[dict[str, Any]]) -> list[RaisedAlert]:
    """Return the alerts in the order in which they were raised."""
    found: list[RaisedAlert] = []
    for event in events:
        if event.get("kind") != "alert":
            continue
        name = str(event.get("alert", ""))
        if not event.get("over"):
            message = str(event.get("message", "")).removeprefix(f"{name}: ")
            found.append(RaisedAlert(event["time"], name, message))
            continue
        for i, alert in enumerate(found):
            if alert.name == name and alert.ended is None:
                found[i] = replace(alert, ended=event["time"])
    return found


def _time_bounds(run: RecordedRun) -> tuple[float, float]:
    """Return the first pod's start or else the first event, and the recorded end or else the last event."""
    times = [event["time"] for event in run.events] + [line.time for line in run.lines]
    pods = run.row.get("pods")
    lives = [pod.get("began") for pod in pods if isinstance(pod, dict)] if isinstance(pods, list) else []
    starts = [life for life in lives if isinstance(life, int | float)] or times
    ended = run.row.get("ended")
    ends = [ended] if isinstance(ended, int | float) and run.state != "running" else times
    began = min(starts, default=0.0)
    return began, max([began, *ends])


@dataclass(frozen=True)
class ReportModel:
    """Contents of a report: settings (baseline first), metrics in page order, timelines by run id, what was asked."""

    name: str
    settings: tuple[Setting, ...]
    metrics: tuple[Metric, ...]
    omitted_metrics: int
    times: dict[str, Timeline]
    asked: Asked | None = None
    smoothing: float = 0.0
    """Weight of what came before in the curves; see `smooth`."""

    @property
    def runs(self) -> list[RecordedRun]:
        return [run for setting in self.settings for run in setting.runs]

    @property
    def superseded_runs(self) -> list[RecordedRun]:
        return [run for setting in self.settings for run in setting.superseded_runs]

    def setting_of(self, run: RecordedRun) -> Setting:
        return self._setting_by_run[run.id]

    @cached_property
    def _setting_by_run(self) -> dict[str, Setting]:
        return {run.id: setting for setting in self.settings for run in (*setting.runs, *setting.superseded_runs)}

    def run_label(self, run: RecordedRun) -> str:
        label = self.setting_of(run).label
        return label if run.seed is None else f"{label} seed {run.seed}"

    def comparisons(self, metric: Metric) -> list[Comparison]:
        """Compare each setting with the baseline, which comes first, by the last value of each run."""
        values = [final_values_by_seed(setting, metric) for setting in self.settings]
        return [summarize(values[0]), *(compare(one, values[0]) for one in values[1:])]

    def runs_without_end(self, metric: Metric) -> list[RecordedRun]:
        """Return the runs that no mean has, since their last value is not finite."""
        runs = [run for setting in self.settings for run in setting.counted_runs if run.curves.get(metric)]
        return [run for run in runs if run.last_value(metric) is None]

    def curves(self, metric: Metric) -> dict[int, tuple[str, Curve]]:
        """Return the label and the curve of each setting that has one, by its place among the settings."""
        points = points_per_curve(self.metrics, self.settings)
        built = enumerate((setting.label, build_curve(setting, metric, points)) for setting in self.settings)
        return {number: (label, smooth(curve, self.smoothing)) for number, (label, curve) in built if curve}

    @cached_property
    def constants(self) -> dict[Metric, float]:
        """The metrics that every run told several times, always with the same value."""
        found: dict[Metric, float] = {}
        for metric in self.metrics:
            told = [run.curves[metric] for run in self.runs if metric in run.curves]
            values = {value for one in told for value in one.values()}
            if len(values) == 1 and max(map(len, told)) > 1 and (value := values.pop()) is not None:
                found[metric] = value
        return found

    def interrupted_steps(self, metric: Metric) -> list[tuple[float, str]]:
        """Return the last step before each interruption of the runs that have the metric, with what happened."""
        return [
            (max((line.step for line in run.lines if line.time <= mark.time), default=0.0), mark.message)
            for run in self.runs
            if metric in run.curves
            for mark in self.times[run.id].interruptions
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document; times in seconds."""
        return {
            "name": self.name,
            "baseline": self.settings[0].label,
            "hypothesis": self.asked and {**self.asked.hypothesis.model_dump(), "misfits": [*self.asked.misfits]},
            "metrics": [self._metric_json(metric) for metric in self.metrics],
            "runs": [self._run_json(run) for run in self.runs],
            "left_out": [run.id for run in self.superseded_runs],
        }

    def _metric_json(self, metric: Metric) -> dict[str, Any]:
        not_finite = [run.id for run in self.runs_without_end(metric)]
        found = {"phase": metric[0], "name": metric[1], "settings": self._settings_json(metric)}
        return found | ({"last_value_not_finite": not_finite} if not_finite else {})

    def _settings_json(self, metric: Metric) -> list[dict[str, Any]]:
        rows = zip(self.settings, self.comparisons(metric), strict=True)
        return [{"setting": s.label, "values": final_values_by_seed(s, metric), **vars(one)} for s, one in rows]

    def _run_json(self, run: RecordedRun) -> dict[str, Any]:
        time = self.times[run.id]
        spans = {kind: round(time.seconds_of(kind), 3) for kind in dict.fromkeys(span.kind for span in time.spans)}
        money = {"pod_hours": time.pod_hours, "usd": time.usd, "goodput": time.goodput}
        return (
            {"run": run.id, "label": self.run_label(run), "state": run.state, "seconds": spans}
            | money
            | {"alerts": [vars(alert) for alert in time.alerts]}
        )


def build_report(
    name: str,
    runs: Sequence[RecordedRun],
    baseline: str = "",
    patterns: Sequence[str] = (),
    smoothing: float = 0.0,
) -> ReportModel:
    """Build the report of at least one run. Raises ConfigError as `group_settings` and `select_metrics` do."""
    found, asked = group_by_hypothesis(name, runs, baseline)
    sought = next((metric for run in runs if (metric := _search_metric(run))), asked.hypothesis.metric if asked else "")
    metrics, further = select_metrics(found, sought, patterns)
    times = {run.id: build_timeline(run) for run in runs}
    return ReportModel(name, tuple(found), tuple(metrics), further, times, asked, smoothing)


def final_values_by_seed(setting: Setting, metric: Metric) -> dict[Any, float]:
    """Return the last finite value of each run by seed, or by run where no seed is recorded."""
    last = {run.id if run.seed is None else run.seed: run.last_value(metric) for run in setting.counted_runs}
    return {seed: value for seed, value in last.items() if value is not None}


def _search_metric(run: RecordedRun) -> str:
    config = (run.record or {}).get("config")
    search = (config.get("sweep") or {}).get("search") if isinstance(config, dict) else None
    return str(search.get("metric", "")) if isinstance(search, dict) else ""

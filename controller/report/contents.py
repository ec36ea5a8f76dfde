"""The contents of a report as values: curves over the seeds, timelines, comparisons; `--json` prints them."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from controller.report.comparison import Asked, Comparison, Setting, compare, group_by_hypothesis, summarize
from controller.report.gather import RESULT_FILE, Metric, MetricsLine, RecordedRun

PREFERRED_METRICS = (
    ("eval", "eval_accuracy"), ("eval", "eval_exact_accuracy"),
    ("test", "test_accuracy"), ("eval", "eval_loss"), ("", "accuracy"), ("", "loss"),
    ("", "reward_mean"),
)  # fmt: skip
"""Metrics that come first, if a run has them; an empty phase matches any."""
MAX_METRICS = 100
MAX_POINTS, MIN_POINTS = 120, 20
MAX_VALUES = 100_000
"""Limit for the values of all curves together, about 1 MB."""
MAX_DRAWABLE = 1e100
"""Larger values cannot be drawn on an axis."""


@dataclass(frozen=True)
class Curve:
    """Values of one setting by step: mean, lowest and highest over its runs."""

    steps: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def select_metrics(settings: Sequence[Setting], wanted: str = "") -> tuple[list[Metric], int]:
    """Return the metrics in the order of the page, and how many others were left out.

    Those that the fewest runs have are left out; the bounds of an interval have no place of their own. `wanted` names a
    metric that comes before all others.
    """
    every = Counter(metric for setting in settings for run in setting.counted_runs for metric in run.curves)
    counts = {metric: count for metric, count in every.items() if not is_bound(metric, every)}

    def rank(metric: Metric) -> int:
        return -1 if metric[1] == wanted else _preference(metric)

    limit = min(MAX_METRICS, max(1, MAX_VALUES // (3 * MIN_POINTS * max(1, len(settings)))))
    kept = sorted(counts, key=lambda metric: (rank(metric), -counts[metric], metric))[:limit]
    return sorted(kept, key=lambda metric: (rank(metric), metric)), len(counts) - len(kept)


def is_preferred(metric: Metric) -> bool:
    """Return whether the metric is one of PREFERRED_METRICS."""
    return _preference(metric) < len(PREFERRED_METRICS)


def _preference(metric: Metric) -> int:
    """Return the place in PREFERRED_METRICS; results of summary.json come after all others."""
    phase, name = metric
    if phase == RESULT_FILE:
        return len(PREFERRED_METRICS) + 1
    like = (i for i, (p, n) in enumerate(PREFERRED_METRICS) if n == name and p in ("", phase))
    return min(like, default=len(PREFERRED_METRICS))


def points_per_curve(metrics: Sequence[Metric], settings: Sequence[Setting]) -> int:
    """Return how many points a curve may have, so that all of them together stay small."""
    share = MAX_VALUES // (3 * max(1, len(metrics)) * max(1, len(settings)))
    return min(MAX_POINTS, max(MIN_POINTS, share))


def build_curve(setting: Setting, metric: Metric, points: int = MAX_POINTS) -> Curve | None:
    """Return the curve of one setting over the steps that all its runs span, or None if there is none to draw.

    Between the steps that a run has logged, its values lie on straight lines: warm starts of different lengths give
    the runs of one setting different steps. If all have finished, each counts with its last value from there on, so
    that the curve ends where the table does. Of a single run, the band is the interval that it told. A run whose last
    values are not finite is not counted there. Long curves keep every k-th step and the last one.
    """
    logged = [run.curves[metric] for run in setting.counted_runs if metric in run.curves]
    finite = [sorted((step, value) for step, value in one.items() if value is not None) for one in logged]
    if not any(finite) or metric[0] == RESULT_FILE:
        return None
    ends = [run.state == "finished" for run in setting.counted_runs if metric in run.curves]
    first, last = max(map(min, logged)), (max if all(ends) else min)(map(max, logged))
    steps = np.array(sorted({step for one in logged for step in one if first <= step <= last}))
    steps = steps[::-1][:: max(1, -(-len(steps) // points))][::-1]
    goes_on = [all(ends) and one[max(one)] is not None for one in logged]
    values = np.array(
        [
            np.interp(steps, *np.array(one, float).T, left=np.nan, right=one[-1][1] if has_end else np.nan)
            for one, has_end in zip(finite, goes_on, strict=True)
            if one
        ]
    )
    known = ~np.isnan(values).all(axis=0)
    steps, values = steps[known], values[:, known]
    if not values.size or np.nanmax(np.abs(values)) > MAX_DRAWABLE:
        return None
    low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    if len(logged) == 1:
        low, high = (_bound(setting.counted_runs, metric, end, steps, at) for end, at in (("low", low), ("high", high)))
    return Curve(*(tuple(row.tolist()) for row in (steps, np.nanmean(values, axis=0), low, high)))


def _bound(runs: Sequence[RecordedRun], metric: Metric, end: str, steps: Any, otherwise: Any) -> Any:
    """Return the bound of the interval that the only run told for a metric; the curve itself if it told none."""
    [told] = [run.curves.get((metric[0], f"{metric[1]}_{end}"), {}) for run in runs if metric in run.curves]
    known = sorted((step, value) for step, value in told.items() if value is not None)
    return np.interp(steps, *np.array(known, float).T) if known else otherwise


def is_bound(metric: Metric, known: Collection[Metric]) -> bool:
    """Return whether a metric is a bound of another one's interval, as whose band it is drawn."""
    base, _, end = metric[1].rpartition("_")
    return end in ("low", "high") and {(metric[0], each) for each in (base, f"{base}_low", f"{base}_high")} <= {*known}


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
        return {number: (label, curve) for number, (label, curve) in built if curve}

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


def build_report(name: str, runs: Sequence[RecordedRun], baseline: str = "") -> ReportModel:
    """Build the report of at least one run. Raises ConfigError as `group_settings` does."""
    found, asked = group_by_hypothesis(name, runs, baseline)
    sought = next((metric for run in runs if (metric := _search_metric(run))), asked.hypothesis.metric if asked else "")
    metrics, further = select_metrics(found, sought)
    times = {run.id: build_timeline(run) for run in runs}
    return ReportModel(name, tuple(found), tuple(metrics), further, times, asked)


def final_values_by_seed(setting: Setting, metric: Metric) -> dict[Any, float]:
    """Return the last finite value of each run by seed, or by run where no seed is recorded."""
    last = {run.id if run.seed is None else run.seed: run.last_value(metric) for run in setting.counted_runs}
    return {seed: value for seed, value in last.items() if value is not None}


def _search_metric(run: RecordedRun) -> str:
    config = (run.record or {}).get("config")
    search = (config.get("sweep") or {}).get("search") if isinstance(config, dict) else None
    return str(search.get("metric", "")) if isinstance(search, dict) else ""

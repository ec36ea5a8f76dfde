"""Timeline of a run, built from its events and metrics: one row of consecutive spans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from controller.report.gather import MetricsLine, RecordedRun

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
    def start(self) -> float:
        return self.spans[0].start if self.spans else 0.0

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

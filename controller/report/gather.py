"""What is known of each run: numbers, events, transcripts; from files of this machine, or from the bucket.

Programs and workers wrote most of it, so that nothing is taken for granted: what cannot be read is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from controller.core.formats import checked, has_format
from controller.gcp.client import Google, NotFound
from controller.records.index import Row
from controller.records.recorder import RECORD, TOLD, folder_of

Metric = tuple[str, str]
"""Phase and name: `("eval", "eval_accuracy")`; phase `result` is what the program left in summary.json."""
Read = Callable[[str, str], Sequence[bytes]]
"""(run, name) -> the contents of that name; none where there is none."""
RESULT = "result"
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
LONGEST_NAME = 80
OWN = ("step", "phase", "time")
"""The keys of a line of metrics.jsonl that are no metrics."""


@dataclass(frozen=True)
class Line:
    """One line of metrics.jsonl: seconds since the epoch, updates done, seconds of an update where it says so."""

    time: float
    step: float
    step_time: float | None


@dataclass(frozen=True)
class Run:
    """One run. `curves` is by metric and step; a value that is not finite is None."""

    row: Row
    record: dict[str, Any] | None
    curves: Mapping[Metric, Mapping[float, float | None]] = field(default_factory=dict)
    lines: Sequence[Line] = ()
    events: Sequence[dict[str, Any]] = ()
    transcripts: Sequence[dict[str, Any]] = ()

    @property
    def id(self) -> str:
        return self.row["run"]

    @property
    def state(self) -> str:
        return str(self.row.get("state", "unknown"))

    @property
    def seed(self) -> Any:
        return self.row.get("seed")

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(str(word) for word in self.row.get("overrides") or ())

    def last(self, metric: Metric) -> float | None:
        """The value at the largest step; None where there is none, or it is not finite."""
        curve = self.curves.get(metric)
        return curve[max(curve)] if curve else None


def from_here(state: Path) -> Read:
    """Files of this machine."""

    def read(run: str, name: str) -> list[bytes]:
        folder = folder_of(state, run)
        names = (name, TOLD) if name == METRICS else (name,)
        return [file.read_bytes() for part in names if (file := folder / part).is_file()][:1]

    return read


def from_bucket(google: Google, bucket: str, otherwise: Read) -> Read:
    """Objects of the bucket, those of all machines; where there is none, what `otherwise` finds."""

    def read(run: str, name: str) -> Sequence[bytes]:
        prefix = f"runs/{run}/{name.removesuffix('.jsonl')}/" if name == EVENTS else f"runs/{run}/{name}"
        try:
            items = list(google.pages("storage", "objects.list", "items", bucket=bucket, prefix=prefix))
            found = [google.download(bucket, item["name"]) for item in items]
        except NotFound:
            found = []
        return found or otherwise(run, name)

    return read


def gathered(rows: Sequence[Row], read: Read) -> list[Run]:
    """The runs of these rows of the table (not flat), oldest first."""
    return [_run(row, read) for row in sorted(rows, key=lambda row: _number(row.get("created")) or 0.0)]


def _run(row: Row, read: Read) -> Run:
    record = next(_own(_documents(read(row["run"], RECORD)), f"{row['run']}: {RECORD}"), None)
    written = list(_lines(read(row["run"], METRICS)))
    curves: dict[Metric, dict[float, float | None]] = {}
    lines = []
    for document in written:
        step, time = _number(document.get("step")), _number(document.get("time"))
        if step is None:
            continue
        if time is not None:
            lines.append(Line(time, step, _number(document.get("step_time"))))
        phase = str(document.get("phase", ""))[:LONGEST_NAME]
        for name, value in document.items():
            if name not in OWN and (value is None or isinstance(value, int | float)):
                curves.setdefault((phase, name[:LONGEST_NAME]), {})[step] = _number(value)
    results = row.get("metrics")
    for name, value in results.items() if isinstance(results, dict) else ():
        if (number := _number(value)) is not None:
            curves[RESULT, name[:LONGEST_NAME]] = {0.0: number}
    known = {metric: curve for metric, curve in curves.items() if any(value is not None for value in curve.values())}
    events = sorted(
        _events(_own(_lines(read(row["run"], EVENTS)), f"{row['run']}: {EVENTS}")), key=lambda event: event["time"]
    )
    transcripts = list(_lines(read(row["run"], "transcripts.jsonl")))
    return Run(row, record, known, sorted(lines, key=lambda line: line.time), events, transcripts)


def _number(value: Any) -> float | None:
    """A finite float, None for anything else; numbers of JSON have no end."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _documents(contents: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for content in contents:
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            yield document


def _own(documents: Iterable[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Those that slipway wrote, without their format.

    Raises:
        FormatError: a later slipway wrote one.
    """
    return (checked(document, where) for document in documents if has_format(document))


def _lines(contents: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for content in contents:
        yield from _documents(content.splitlines())


def _events(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for event in events:
        try:
            yield event | {"time": datetime.fromisoformat(event["time"]).timestamp()}
        except (KeyError, TypeError, ValueError):
            continue

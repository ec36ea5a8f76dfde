"""Gather files of runs: metrics, events and transcripts for a report, and copies of TensorBoard's files.

Programs and workers wrote most of them, so unreadable content is skipped.
"""

import io
import re
import sys
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from conf.formats import format_problem
from conf.strict_json import loads
from controller.core.json_documents import checked, has_format
from controller.core.text import finite_number
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import NotFoundError
from controller.records.index import RunRow
from controller.records.recorder import LOCAL_METRICS_FILE, RECORD_FILE, run_folder
from controller.report.thinned import Thinned, sample_transcripts

Metric = tuple[str, str]
"""Phase and name: `("eval", "eval_accuracy")`; phase `result` holds the values of the program's summary.json."""
FileReader = Callable[[str, str], Iterable[IO[bytes]]]
"""(run, name) -> all files of that name; empty if there is none."""
RESULT_FILE = "result"
METRICS_FILE, EVENTS = "metrics.jsonl", "events.jsonl"
MAX_NAME_LENGTH = 80
RESERVED_KEYS = ("step", "phase", "time")
"""Keys of a line in metrics.jsonl that are not metrics."""


@dataclass(frozen=True)
class MetricsLine:
    """One line of metrics.jsonl: seconds since the epoch, updates done, and seconds per update if given."""

    time: float
    step: float
    step_time: float | None


@dataclass(frozen=True)
class RecordedRun:
    """One run. `curves` is by metric and step; a value that is not finite is None.

    Curves and `lines` are thinned, see `Thinned`; of the lines, those at both ends of an attempt stay.
    `transcripts` are a sample of `num_transcripts`.
    """

    row: RunRow
    record: dict[str, Any] | None
    curves: Mapping[Metric, Mapping[float, float | None]] = field(default_factory=dict)
    lines: Sequence[MetricsLine] = ()
    events: Sequence[dict[str, Any]] = ()
    transcripts: Sequence[dict[str, Any]] = ()
    num_transcripts: int = 0

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
    def overrides(self) -> tuple[str, ...]:
        return tuple(str(word) for word in self.row.get("overrides") or ())

    def last_value(self, metric: Metric) -> float | None:
        """Return the value at the largest step; None if it is missing or not finite."""
        curve = self.curves.get(metric)
        return curve[max(curve)] if curve else None


def local_reader(state: Path) -> FileReader:
    def read(run: str, name: str) -> Iterator[IO[bytes]]:
        folder = run_folder(state, run)
        names = (name, LOCAL_METRICS_FILE) if name == METRICS_FILE else (name,)
        if path := next((file for part in names if (file := folder / part).is_file()), None):
            with path.open("rb") as file:
                yield file

    return read


def bucket_reader(google: GoogleClient, bucket: str, otherwise: FileReader) -> FileReader:
    """Return a reader of the bucket's objects from all machines; where there are none, `otherwise` is used."""

    def read(run: str, name: str) -> Iterable[IO[bytes]]:
        prefix = f"runs/{run}/{name.removesuffix('.jsonl')}/" if name == EVENTS else f"runs/{run}/{name}"
        try:
            items = list(google.list_all("storage", "objects.list", "items", bucket=bucket, prefix=prefix))
        except NotFoundError:
            items = []
        found = [io.BufferedReader(_Object(google, bucket, item), DOWNLOADED_BYTES) for item in items]
        return found or otherwise(run, name)

    return read


class _Object(io.RawIOBase):
    """Content of an object, piece by piece. One that grows meanwhile is read on; one that is deleted ends there."""

    def __init__(self, google: GoogleClient, bucket: str, item: Mapping[str, Any]) -> None:
        self._google, self._bucket, self._item, self._at = google, bucket, item, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        name, content = self._item["name"], b""
        try:
            while not content and (end := min(self._at + len(buffer), int(self._item["size"]))) > self._at:
                try:
                    content = self._google.download_range(self._bucket, name, self._item["generation"], self._at, end)
                except NotFoundError:
                    self._item = self._google.call("storage", "objects.get", bucket=self._bucket, object=name)
        except NotFoundError:
            return 0
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def gather_runs(rows: Sequence[RunRow], read: FileReader) -> list[RecordedRun]:
    """Return the runs of these (nested) table rows, oldest first."""
    return [_load_run(row, read) for row in sorted(rows, key=lambda row: finite_number(row.get("created")) or 0.0)]


def _load_run(row: RunRow, read: FileReader) -> RecordedRun:
    run = row["run"]
    record = next(
        _slipway_documents(_documents(file.read() for file in read(run, RECORD_FILE)), f"{run}: {RECORD_FILE}"), None
    )
    events = sorted(
        _parse_events(_slipway_documents(parse_lines(read(run, EVENTS)), f"{run}: {EVENTS}")),
        key=lambda event: event["time"],
    )
    curves, lines = _read_metrics(parse_lines(read(run, METRICS_FILE)), [event["time"] for event in events])
    _begin_with_warm_start(curves)
    results = row.get("metrics")
    for name, value in results.items() if isinstance(results, dict) else ():
        if (number := finite_number(value)) is not None:
            curves[RESULT_FILE, name[:MAX_NAME_LENGTH]] = {0.0: number}
    known = {metric: curve for metric, curve in curves.items() if any(value is not None for value in curve.values())}
    return RecordedRun(
        row, record, known, lines, events, *sample_transcripts(lambda: parse_lines(read(run, "transcripts.jsonl")))
    )


def _read_metrics(
    documents: Iterable[dict[str, Any]], times: Sequence[float]
) -> tuple[dict[Metric, dict[float, float | None]], list[MetricsLine]]:
    """Return the curves, and the lines by time: between two of the times, which events have, both ends are exact."""
    curves: dict[Metric, Thinned[float | None]] = defaultdict(Thinned)
    lines: dict[int, Thinned[MetricsLine]] = defaultdict(Thinned)
    for document in documents:
        step, time = finite_number(document.get("step")), finite_number(document.get("time"))
        if step is None:
            continue
        if time is not None:
            told, known = finite_number(document.get("step_time")), (near := lines[bisect(times, time)]).get(time)
            near.add(time, MetricsLine(time, step, known.step_time if known and told is None else told))
        phase = str(document.get("phase", ""))[:MAX_NAME_LENGTH]
        for name, value in document.items():
            if name not in RESERVED_KEYS and (value is None or isinstance(value, int | float)):
                curves[phase, name[:MAX_NAME_LENGTH]].add(step, finite_number(value))
    return {**curves}, [line for place in sorted(lines) for line in dict(sorted(lines[place].items())).values()]


def _begin_with_warm_start(curves: Mapping[Metric, dict[float, float | None]]) -> None:
    """Let each curve of evaluations begin with the last one of the warm start: that is the value before GRPO."""
    for (phase, name), curve in [*curves.items()]:
        later = curves.get(("eval", name))
        if phase == "warm_start" and name.startswith("eval_") and later:
            later.setdefault(max(curve), curve[max(curve)])


def _documents(contents: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for content in contents:
        try:
            document = loads(content)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            yield document


def _slipway_documents(documents: Iterable[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Yield the documents that Slipway wrote, without their format; what a later one wrote is left out, and told."""
    later = ""
    for document in filter(has_format, documents):
        if problem := format_problem(document, where):
            later = problem
        else:
            yield checked(document, where)
    if later:
        print(f"warning: left out: {later}", file=sys.stderr)


def parse_lines(files: Iterable[IO[bytes]]) -> Iterator[dict[str, Any]]:
    """Yield the objects in files of lines, such as metrics.jsonl; a line that is none is left out."""
    for file in files:
        yield from _documents(file)


def _parse_events(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for event in events:
        try:
            yield event | {"time": datetime.fromisoformat(event["time"]).timestamp()}
        except (KeyError, TypeError, ValueError):
            continue


PART = re.compile(r"[A-Za-z0-9][\w.=+-]{0,199}", re.ASCII)
"""Valid part of a path: workers name a run's objects and must not reach any other file here."""
PARALLEL_RUNS = 8
DOWNLOADED_BYTES = 4 << 20
"""Most bytes of an object that are in memory at a time."""
OVERLAP_BYTES = 1 << 10
"""Bytes of the end of a known file that are downloaded again, to see that it has only grown."""


class TensorBoardMirror:
    """Copies new data of runs.

    Args:
        folders: the target folder of each run.
    """

    def __init__(self, google: GoogleClient, bucket: str, folders: Mapping[str, Path]) -> None:
        self._google, self._bucket, self._folders = google, bucket, folders
        self._copied: dict[str, str] = {}

    def update(self, runs: set[str]) -> int:
        """Copy new and grown files of these runs; returns how many."""
        with ThreadPoolExecutor(max_workers=PARALLEL_RUNS, thread_name_prefix="mirror") as pool:
            return sum(pool.map(self._update_run, sorted(runs)))

    def _update_run(self, run: str) -> int:
        prefix, copied = f"runs/{run}/tb/", 0
        where = {"bucket": self._bucket, "prefix": prefix, "fields": "items(name,size,generation),nextPageToken"}
        try:
            items = list(self._google.list_all("storage", "objects.list", "items", **where))
        except NotFoundError:
            return 0
        for item in items:
            name, generation = item["name"], item["generation"]
            parts = name.removeprefix(prefix).split("/")
            if self._copied.get(name) == generation or not all(PART.fullmatch(part) for part in parts):
                continue
            try:
                self._copy(self._folders[run].joinpath(*parts), name, generation, int(item["size"]))
            except NotFoundError:
                continue  # replaced or deleted since it was listed
            self._copied[name] = generation
            copied += 1
        return copied

    def _copy(self, file: Path, name: str, generation: str, size: int) -> None:
        """Append what is new in place if the file has only grown: TensorBoard keeps it open and reads on."""
        known = file.stat().st_size if file.is_file() else 0
        if 0 < known <= size:
            begin = max(0, known - OVERLAP_BYTES)
            content = self._google.download_range(self._bucket, name, generation, begin, size)
            with file.open("r+b") as out:
                out.seek(begin)
                if content.startswith(end := out.read()):
                    out.write(content[len(end) :])
                    return
        content = self._google.download(self._bucket, name)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_bytes(content)


def folder_name(label: str, run: str) -> str:
    """Return the folder name of a run, which TensorBoard shows as the run's name: its setting and id."""
    name = re.sub(r"[^\w.=+-]+", "_", label, flags=re.ASCII).strip("_.-")[:100]
    return f"{name}_{run[-8:]}" if name else run

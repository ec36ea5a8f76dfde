"""Gather files of runs: metrics, events and transcripts for a report, and copies of TensorBoard's files.

Programs and workers wrote most of them, so unreadable content is skipped.
"""

import re
import sys
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

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
Lines = Iterable[bytes]
FileReader = Callable[[str, str], Iterable[Lines]]
"""(run, name) -> the lines of all files of that name; empty if there is none."""
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
    def read(run: str, name: str) -> Iterator[Lines]:
        folder = run_folder(state, run)
        names = (name, LOCAL_METRICS_FILE) if name == METRICS_FILE else (name,)
        if path := next((file for part in names if (file := folder / part).is_file()), None):
            with path.open("rb") as file:
                yield file

    return read


def bucket_reader(google: GoogleClient, bucket: str, otherwise: FileReader) -> FileReader:
    """Return a reader of the bucket's objects from all machines; where there are none, `otherwise` is used."""

    def read(run: str, name: str) -> Iterable[Lines]:
        prefix = f"runs/{run}/{name.removesuffix('.jsonl')}/" if name == EVENTS else f"runs/{run}/{name}"
        found = [_object_lines(google, bucket, item) for item in google.objects(bucket, prefix)]
        return found or otherwise(run, name)

    return read


def _object_lines(google: GoogleClient, bucket: str, item: dict[str, Any]) -> Iterator[bytes]:
    rest, at = b"", 0
    while at < (size := int(item["size"])):
        end = min(at + DOWNLOADED_BYTES, size)
        try:
            content = google.download_range(bucket, item["name"], item["generation"], at, end)
        except NotFoundError:  # it has grown, or is gone
            if (newer := google.find("storage", "objects.get", bucket=bucket, object=item["name"])) is None:
                break
            item = newer
            continue
        if not content:  # a shorter one has replaced it
            break
        *whole, rest = (rest + content).split(b"\n")
        at += len(content)
        yield from whole
    yield rest


def gather_runs(rows: Sequence[RunRow], read: FileReader) -> list[RecordedRun]:
    """Return the runs of these (nested) table rows, oldest first."""
    return [_load_run(row, read) for row in sorted(rows, key=lambda row: finite_number(row.get("created")) or 0.0)]


def _load_run(row: RunRow, read: FileReader) -> RecordedRun:
    run = row["run"]
    found = _documents(b"\n".join(lines) for lines in read(run, RECORD_FILE))
    record = next(_slipway_documents(found, f"{run}: {RECORD_FILE}"), None)
    events = sorted(
        _parse_events(_slipway_documents(parse_lines(read(run, EVENTS)), f"{run}: {EVENTS}")),
        key=lambda event: event["time"],
    )
    times = [event["time"] for event in events]
    curves: dict[Metric, Thinned[float | None]] = defaultdict(Thinned)
    spans: dict[int, Thinned[MetricsLine]] = defaultdict(Thinned)  # between two events, so that both ends stay
    for document in parse_lines(read(run, METRICS_FILE)):
        step, time = finite_number(document.get("step")), finite_number(document.get("time"))
        if step is None:
            continue
        if time is not None:
            told, known = finite_number(document.get("step_time")), (near := spans[bisect(times, time)]).get(time)
            near.add(time, MetricsLine(time, step, known.step_time if known and told is None else told))
        phase = str(document.get("phase", ""))[:MAX_NAME_LENGTH]
        for name, value in document.items():
            if name not in RESERVED_KEYS and (value is None or isinstance(value, int | float)):
                curves[phase, name[:MAX_NAME_LENGTH]].add(step, finite_number(value))
    _begin_with_warm_start(curves)
    results = row.get("metrics")
    for name, value in results.items() if isinstance(results, dict) else ():
        if (number := finite_number(value)) is not None:
            curves[RESULT_FILE, name[:MAX_NAME_LENGTH]] = Thinned({0.0: number})
    known = {metric: curve for metric, curve in curves.items() if any(value is not None for value in curve.values())}
    lines = sorted((line for near in spans.values() for line in near.values()), key=lambda line: line.time)
    transcripts = sample_transcripts(lambda: parse_lines(read(run, "transcripts.jsonl")))
    return RecordedRun(row, record, known, lines, events, *transcripts)


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


def parse_lines(files: Iterable[Lines]) -> Iterator[dict[str, Any]]:
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
"""Most bytes of an object in memory."""
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
        for item in self._google.objects(self._bucket, prefix, "name,size,generation"):
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

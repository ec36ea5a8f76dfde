"""Record of a run in the bucket: `runs/<id>/` with plan, launches, exit codes and logs, alerts, and the result.

Objects that must be created once have a generation precondition, so that two controllers cannot both win.
https://cloud.google.com/storage/docs/request-preconditions
"""

import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import datetime
from typing import Any, ClassVar, Self, TypeVar

from conf.strict_json import dumps
from controller.context import Context
from controller.core.errors import SlipwayError
from controller.core.json_documents import (
    DamagedRecordError,
    Document,
    Record,
    UnreadableError,
    checked,
    dump,
    has_format,
    load_json,
)
from controller.core.text import format_duration, object_url
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ConflictError, NotFoundError
from controller.records import index

T = TypeVar("T")

UNKNOWN_POD = ""
"""The pod of a launch whose record is damaged."""


@dataclass(frozen=True)
class Launch(Document):
    """One start of the program on one incarnation of the pod, by the controller with this lease token."""

    KEYS: ClassVar = {"lease": "lease_token"}

    attempt: int
    node_uid: str
    time: float
    lease: int = 0


@dataclass(frozen=True)
class Result(Document):
    """Result of a run. `summary` is the content of the program's summary.json.

    `cleanup` is the cleanup policy for the pod, needed if a controller is killed before it could apply it.
    """

    run_id: str
    outcome: str
    attempts: int
    ended: float
    seconds: float
    summary: dict[str, Any] = field(default_factory=dict)
    cleanup: str = "keep"


def parse_record(content: bytes, parse: Callable[[Any, str], T], name: str) -> T:
    """Parse an object of a run's record.

    Raises:
        DamagedRecordError: it is no document of Slipway, lacks a key, or has a value of another type.
        FormatError: a later Slipway wrote it. Whoever treats both alike catches UnreadableError.
    """
    body = load_json(content, name)
    if not has_format(body):
        raise DamagedRecordError(f"{name} is damaged: no document of Slipway")
    try:
        parsed = parse(body, name)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedRecordError(f"{name} is damaged: {type(error).__name__} {error}") from None
    return _with_checked_types(parsed, name) if is_dataclass(parsed) else parsed


def _with_checked_types(parsed: T, name: str) -> T:
    """Return the document with every field of its declared type. Raises DamagedRecordError."""
    from pydantic import TypeAdapter, ValidationError  # here, since verbs that only list runs import none of it

    try:
        return TypeAdapter(type(parsed)).validate_python(vars(parsed))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DamagedRecordError(f"{name} is damaged: {key}: {first['msg']}") from None


def read_objects(google: GoogleClient, bucket: str, prefix: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield metadata and content of the objects under a prefix, by name; those that vanish meanwhile are left out."""
    for item in sorted(google.objects(bucket, prefix), key=lambda item: item["name"]):
        if (content := google.read(bucket, item["name"])) is not None:
            yield item, content


class Ledger:
    """Reader and writer of the record of one run.

    A damaged or missing object ends no run: `problems` names it.
    """

    def __init__(self, google: GoogleClient, bucket: str, run_id: str) -> None:
        self._google, self.bucket, self.run_id = google, bucket, run_id
        self.prefix = f"runs/{run_id}"
        self.problems: list[str] = []
        self._last_incident = 0

    def result(self) -> Result | None:
        """Return the result; None if the run has not finished successfully or does not exist.

        Raises DamagedRecordError if the object is not what Slipway wrote.
        """
        content, name = self.read("result.json"), f"{self.prefix}/result.json"
        return None if content is None else parse_record(content, Result.from_json, name)

    def record_result(self, result: Result) -> None:
        """Record the result; only the first one counts, and it replaces an object that is none."""
        text = dumps(result.to_json(), indent=1)
        if self.create("result.json", text):
            return
        try:
            self.result()
        except DamagedRecordError as error:
            self.report(str(error))
            self.write("result.json", text)

    def launches(self) -> list[Launch]:
        """Return every launch, oldest first; one whose record is damaged has its number and time, and UNKNOWN_POD."""
        found: list[Launch] = []
        for item, content in read_objects(self._google, self.bucket, f"{self.prefix}/launches/"):
            number = re.fullmatch(r"(\d+)\.json", item["name"].rpartition("/")[2])
            if number is None:  # somebody else's
                continue
            try:
                launch = parse_record(content, Launch.from_json, item["name"])
                if launch.attempt != int(number[1]):
                    raise DamagedRecordError(f"{item['name']} is damaged: it records attempt {launch.attempt}")
                found.append(launch)
            except UnreadableError as error:
                self.report(str(error))
                written = datetime.fromisoformat(item["updated"]).timestamp()
                found.append(Launch(int(number[1]), UNKNOWN_POD, written))
        return sorted(found, key=lambda launch: launch.attempt)

    def record_launch(self, launch: Launch) -> bool:
        """Record a launch before it is made; return False if another controller recorded this attempt first."""
        return self.create(_launch_name(launch.attempt), dumps(launch.to_json()))

    def launch_object(self, attempt: int) -> str:
        """Return the full name of the object that records a launch."""
        return f"{self.prefix}/{_launch_name(attempt)}"

    def record_cancellation(self) -> None:
        """Mark the latest attempt as cancelled, so that the controller that follows it does not restart it."""
        if launches := self.launches():
            self.create(f"cancels/{launches[-1].attempt:04d}.json", dump({}))

    def is_cancelled(self, attempt: int) -> bool:
        return self.read(f"cancels/{attempt:04d}.json") is not None

    def incidents(self, parse: Callable[[Any, str], T]) -> list[T]:
        """Return the incidents of the run, oldest first: each failed attempt and the response to it."""
        found: list[T] = []
        for item, content in read_objects(self._google, self.bucket, f"{self.prefix}/verdicts/"):
            if number := re.fullmatch(r"(\d+)\.json", item["name"].rpartition("/")[2]):
                self._last_incident = max(self._last_incident, int(number[1]))
            try:
                found.append(parse_record(content, parse, item["name"]))
            except UnreadableError as error:
                self.report(str(error))
        return found

    @property
    def problem_urls(self) -> list[str]:
        """Return the problems, each with the whole address of its object or file."""
        return [text if text.startswith("/") else object_url(self.bucket, text) for text in self.problems]

    def report(self, problem: str) -> None:
        """Name a damaged or missing object once; the message starts with its name, or with the path of a local file."""
        if problem not in self.problems:
            self.problems.append(problem)

    def add_incident(self, document: dict[str, Any]) -> None:
        """Record an incident after those that `incidents` has seen, damaged ones included; repeating it is safe."""
        number = self._last_incident + 1
        self.create(f"verdicts/{number:04d}.json", dumps(document, indent=1))
        self._last_incident = number

    def checkpoints(self) -> list[int]:
        """Return the steps of the run's checkpoints: the numbers of the folders `checkpoints/N`."""
        where = {"bucket": self.bucket, "prefix": f"{self.prefix}/checkpoints/", "delimiter": "/"}
        folders: Iterator[Any] = self._google.list_all("storage", "objects.list", "prefixes", **where)
        try:
            names = [folder.rstrip("/").rpartition("/")[2] for folder in folders]
        except NotFoundError:
            return []
        return [int(number[0]) for name in names if (number := re.findall(r"\d+", name))]

    def checkpoint_time(self, step: int) -> float | None:
        """Return when the last object of a checkpoint was written, in seconds since the epoch; None if it is gone."""
        items = self._google.objects(self.bucket, f"{self.prefix}/checkpoints/{step}/", "updated")
        return max((datetime.fromisoformat(item["updated"]).timestamp() for item in items), default=None)

    def write(self, name: str, text: str) -> None:
        """Write a document of the run, replacing any earlier one."""
        self._google.upload(self.bucket, f"{self.prefix}/{name}", text.encode())

    def exists(self, name: str) -> bool:
        return self.read(name) is not None

    def log_object(self, worker: int, attempt: int) -> str:
        return f"{self.prefix}/logs/attempt-{attempt}/worker-{worker}.log"

    def exit_object(self, worker: int, attempt: int) -> str:
        return f"{self.prefix}/logs/attempt-{attempt}/worker-{worker}.exit.json"

    def exit_status(self, worker: int, attempt: int) -> str | None:
        """Return `code 1` or the signal; None while the program runs there or if its end was not recorded."""
        name = self.exit_object(worker, attempt)
        content = self.read(name.removeprefix(f"{self.prefix}/"))
        if content is None:
            return None
        try:
            ended = parse_record(content, checked, name)
        except UnreadableError:
            return "an end whose record is damaged"
        return f"code {ended['code']}" if ended.get("code") is not None else str(ended.get("signal") or "an error")

    def read(self, name: str) -> bytes | None:
        """Return a document of the run, or None if it does not exist."""
        return self._google.read(self.bucket, f"{self.prefix}/{name}")

    def create(self, name: str, text: str) -> bool:
        """Write a document unless it exists; return whether it was written."""
        try:
            self._google.upload(self.bucket, f"{self.prefix}/{name}", text.encode(), generation=0)
        except ConflictError:
            return False
        return True


def record_cancellations(context: Context, bucket: str, runs: Collection[str]) -> list[str]:
    """Mark the latest attempts of runs as cancelled, and the runs in the tables of this machine and of the bucket.

    A controller that drives one of them writes its row again when it ends, with what the run cost.

    Returns:
        What went wrong: it must keep no pod alive.
    """
    problems, now = list[str](), context.clock.now()
    for run_id in runs:
        try:
            Ledger(context.google, bucket, run_id).record_cancellation()
        except SlipwayError as error:
            problems.append(str(error))
        try:
            index.mark_ended(context.google, bucket, run_id, "cancelled", now)
        except SlipwayError as error:  # its controller has been told all the same
            print(f"warning: the bucket's table of runs shows {run_id} as it was: {error}", file=sys.stderr)
    with context.local_notes.best_effort(index.index_file(context.state_dir)):
        known = {row["run"]: row.get("state") for row in index.load_rows(context.state_dir)}
        ended = [run_id for run_id in runs if known.get(run_id) == "running"]
        index.append_rows(context.state_dir, [index.ended_row(run_id, "cancelled", now) for run_id in ended])
    return problems


def _launch_name(attempt: int) -> str:
    return f"launches/{attempt:04d}.json"


ALERTS_FILE = "alerts.json"
MAX_RECORDED = 50
"""Number of alerts in the record; a program of the user's own may raise any number."""


@dataclass(frozen=True)
class Alert(Record):
    """One alert.

    Attributes:
        name: what is wrong, in two words.
        message: what is wrong, and which key or page to look at.
        since: when it was first seen, seconds since the epoch.
        ended: when it was over; None while it lasts.
        limit: the value that the metric has to return to; None if the alert does not compare one.
    """

    name: str
    message: str
    since: float
    ended: float | None = None
    limit: float | None = None

    def over(self, now: float) -> "Alert":
        return replace(self, ended=now)

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


@dataclass(frozen=True)
class AlertRecord(Document):
    """Alerts of one attempt, oldest first, as the controller that followed it last saw them."""

    attempt: int
    alerts: tuple[Alert, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"alerts": [alert.to_json() for alert in self.alerts]}

    @classmethod
    def from_json(cls, body: Any, where: str = "") -> Self:
        found = super().from_json(body, where or ALERTS_FILE)
        return replace(found, alerts=tuple(Alert.from_json(alert) for alert in found.alerts))

    @property
    def active(self) -> list[Alert]:
        return [alert for alert in self.alerts if alert.ended is None]


def read_alerts(ledger: Ledger) -> AlertRecord:
    """Return the alerts of the run's latest attempt that was followed; none if there never was one.

    If the record is damaged there are none, and `ledger.problems` names it.
    """
    content = ledger.read(ALERTS_FILE)
    if content is None:
        return AlertRecord(0)
    try:
        return parse_record(content, AlertRecord.from_json, f"{ledger.prefix}/{ALERTS_FILE}")
    except UnreadableError as error:
        ledger.report(str(error))
        return AlertRecord(0)


def write_alerts(ledger: Ledger, record: AlertRecord) -> None:
    kept = record.alerts[-MAX_RECORDED:]
    ledger.write(ALERTS_FILE, dumps(replace(record, alerts=kept).to_json(), indent=1))


def describe_alert(alert: Alert, now: float) -> str:
    """Describe an alert as `status` does: its name, for how long, and what to look at."""
    if alert.ended is None:
        return f"ALERT {alert.name} (for {_duration(alert.since, now)}): {alert.message}"
    lasted, ago = _duration(alert.since, alert.ended), _duration(alert.ended, now)
    return f"past alert {alert.name} (for {lasted}, until {ago} ago): {alert.message}"


def _duration(start: float, end: float) -> str:
    return format_duration(max(0.0, end - start))

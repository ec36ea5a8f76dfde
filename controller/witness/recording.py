"""The recording of a first contact: every request and answer, the stages, and facts about the workers.

Raw values are only in memory, and those of others not even there. Each file is scrubbed as a whole before it is
written, and scanned after that.
"""

import itertools
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from conf.strict_json import dumps
from controller.core.json_documents import Document, Record, stamped
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.witness.stand_ins import StandIns, omit_others

REQUESTS, README = "requests.jsonl", "README.md"
REQUEST_HEADERS = frozenset({"content-type", "x-goog-user-project", "x-upload-content-length", "content-range"})
ANSWER_HEADERS = frozenset({
    "content-type", "retry-after", "date", "etag", "www-authenticate", "x-goog-generation", "x-goog-hash", "range",
})  # fmt: skip
"""Headers that are recorded; no other one is, so no token is."""
READ_VERBS = ("getIamPolicy", "getEffectiveOrgPolicy", "testIamPermissions", "getGuestAttributes", "wait")
"""Methods that use POST but change nothing."""
MAX_TEXT = 4000
"""Characters recorded of an answer that is not JSON."""


@dataclass(frozen=True)
class RequestLine(Document):
    """One request and its answer: a line of `requests.jsonl`.

    Attributes:
        number: order in which the requests began, from 1.
        began: seconds since the recording began.
        stage: the stage it belongs to.
        method_id: method of the discovery document, such as tpu.projects.locations.nodes.get.
        path: path below the root of the API.
        body: JSON sent; null for none and for the content of an object, whose size is `body_bytes`.
        status: HTTP status; 0: there was no answer, and `error` says why.
        answer: JSON received, or the text; null for the content of an object.
    """

    number: int
    began: float
    seconds: float
    stage: str
    method_id: str
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    body_bytes: int
    status: int
    answer_headers: dict[str, str]
    answer: Any
    answer_bytes: int
    error: str = ""

    @property
    def is_change(self) -> bool:
        return self.method not in ("GET", "HEAD") and not self.method_id.endswith(READ_VERBS)

    @property
    def is_wait(self) -> bool:
        return self.method_id.endswith("perations.wait")

    @property
    def moment(self) -> float:
        """Return when it is sent again: a request that waits when it had its answer."""
        return self.began + (self.seconds if self.is_wait else 0.0)

    @property
    def passing(self) -> str:
        """Return why it is not sent again, empty if it is."""
        if self.status == 0:
            return "there was no answer"
        if self.status >= 500 or self.status in (408, 429):
            return f"{self.status} is a passing failure"
        is_resumable = self.path.startswith("resumable/") or self.query.get("uploadType") == "resumable"
        return "it is part of a resumable upload" if is_resumable else ""

    @cached_property
    def key(self) -> str:
        """Return what makes two requests the same."""
        return dumps([self.method, self.path, self.query, self.body], sort_keys=True)

    def overlaps(self, change: "RequestLine") -> bool:
        """Return whether it was answered while a change was under way, so that either order is possible."""
        return self.began <= change.began + change.seconds and change.began <= self.began + self.seconds


@dataclass
class Stage(Record):
    """One stage: what was done, when, and how it ended."""

    name: str
    began: float
    seconds: float = 0.0
    outcome: str = "running"
    """running, ok, failed, interrupted, limit, or skipped."""
    detail: str = ""
    notes: list[str] = field(default_factory=list)


class Recording:
    """Collects everything in memory and writes it to a folder, scrubbed. Thread-safe."""

    def __init__(self, folder: Path, clock: Clock, stand_ins: StandIns) -> None:
        self.folder, self.stand_ins = folder, stand_ins
        self.stages: list[Stage] = []
        self.facts: dict[str, Any] = {}
        """Facts about the whole: cost, limits, versions."""
        self.lines: list[RequestLine] = []
        """In the order in which they ended."""
        self.numbers = itertools.count(1)
        """Of requests, in the order in which they begin."""
        self._lock = threading.RLock()
        self.start(clock)

    def start(self, clock: Clock) -> None:
        """Count the seconds from now on, by that clock."""
        self._clock, self._began = clock, clock.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the recording began."""
        return round(self._clock.monotonic() - self._began, 3)

    @property
    def stage(self) -> Stage | None:
        """Return the stage in progress."""
        return next((stage for stage in reversed(self.stages) if stage.outcome == "running"), None)

    def begin(self, name: str) -> None:
        """Begin a stage; the one before it ends."""
        with self._lock:
            self.end("ok")
            self.stages.append(Stage(name, self.seconds()))

    def end(self, outcome: str, detail: str = "") -> None:
        """End the stage in progress, if there is one."""
        with self._lock:
            if (stage := self.stage) is not None:
                stage.outcome, stage.detail = outcome, detail
                stage.seconds = round(self.seconds() - stage.began, 3)

    def note(self, message: str) -> None:
        if (stage := self.stage) is not None:
            stage.notes.append(message)

    @property
    def requests(self) -> list[RequestLine]:
        return sorted(self.lines, key=lambda line: line.number)

    @contextmanager
    def recorded(self, google: GoogleClient) -> Iterator[None]:
        """Record every request of a client inside the block."""
        before = google.wrap_connection
        google.wrap_connection = lambda http, method_id: RecordedConnection(
            before(http, method_id), self, method_id, google.root(method_id.partition(".")[0])
        )
        try:
            yield
        finally:
            google.wrap_connection = before

    def save(self, differences: str = "") -> list[str]:
        """Write the files and scan them; return what the scan refused to keep, empty if all is well.

        `differences` is a text of the README.
        """
        lines = [line.to_json() for line in without_repeats(self.requests)]
        by = "Google" if self.facts.get("cloud") == "gcp" else "the emulated cloud, NOT Google"
        first = stamped({"answers_by": by, **self.facts, "stages": [stage.to_json() for stage in self.stages]})
        for document in (first, *lines):
            self.stand_ins.learn(document)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        scrub = self.stand_ins.scrub
        self._write(REQUESTS, "".join(dumps(scrub(line)) + "\n" for line in (first, *lines)))
        self._write(README, scrub(readme(self)) + differences)
        refused = []
        for file in (self.folder / REQUESTS, self.folder / README):
            if leaks := {leak for line in file.read_text().splitlines() for leak in self.stand_ins.leaks(line)}:
                file.unlink()
                refused.append(f"{file.name} was deleted: it still held what {', '.join(sorted(leaks))} stands for")
        return refused

    def _write(self, name: str, text: str) -> None:
        draft = self.folder / f".{name}.new"
        with open(draft, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(text)
        draft.replace(self.folder / name)


def load(file: Path) -> tuple[dict[str, Any], list[RequestLine]]:
    """Return the first line of a recording, and its requests. Raises ValueError or FormatError if it is none."""
    first, *lines = [json.loads(line) for line in file.read_text().splitlines()] or [{}]
    return first, [RequestLine.from_json(line, REQUESTS) for line in lines]


def without_repeats(lines: list[RequestLine]) -> list[RequestLine]:
    """Return the requests without those between the first and the last of a row that got the same answer."""
    kept, rows = list[RequestLine](), dict[str, tuple[str, list[RequestLine]]]()
    for line in lines:
        answer = dumps([line.status, line.answer])
        said, row = rows.get(line.key, ("", []))
        if line.is_change or answer != said:
            row.clear()
        elif len(row) > 1:
            kept.remove(row.pop())
        rows[line.key] = answer, [*row, line]
        kept.append(line)
    return kept


class RecordedConnection:
    """An HTTP connection that records what passes; it sends exactly what it is given."""

    def __init__(self, http: Any, recording: Recording, method_id: str, root: str) -> None:
        self._http, self._recording, self._method_id, self._root = http, recording, method_id, root

    def __getattr__(self, name: str) -> Any:
        return getattr(self._http, name)

    def request(self, uri: str, method: str = "GET", body: Any = None, headers: Any = None, **options: Any) -> Any:
        recording = self._recording
        number, began, stage = next(recording.numbers), recording.seconds(), recording.stage
        status, answer_headers, content, error = 0, {}, b"", ""
        sent = dict(headers or {})
        try:
            answer, content = self._http.request(uri, method=method, body=body, headers=headers, **options)
            status, answer_headers = int(answer.status), dict(answer)
            return answer, content
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            path, query = self._split(uri)
            is_media = query.get("alt") == "media" and status < 400
            asked = omit_others(self._method_id, _json(body, sent))
            answered = None if is_media else omit_others(self._method_id, _answer(content))
            recording.lines.append(RequestLine(
                number, began, round(recording.seconds() - began, 3), stage.name if stage else "", self._method_id,
                method, path, query, _chosen(sent, REQUEST_HEADERS), asked, _size(body), status,
                _chosen(answer_headers, ANSWER_HEADERS), answered, len(content or b""), error,
            ))  # fmt: skip

    def _split(self, uri: str) -> tuple[str, dict[str, str]]:
        """Return path and query of a URL; the path is below the API's root, which differs on the emulated cloud."""
        parts = urlsplit(uri)
        root = urlsplit(self._root).path
        path = parts.path.removeprefix(root) if root != "/" else parts.path.lstrip("/")
        query: dict[str, str] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            query[name] = f"{query[name]},{value}" if name in query else value
        query.pop("upload_id", None)  # a resumable upload's, which anyone who has it could continue
        return path.lstrip("/"), query


def _chosen(headers: dict[str, Any], wanted: frozenset[str]) -> dict[str, str]:
    return {name.lower(): str(value) for name, value in sorted(headers.items()) if name.lower() in wanted}


def _json(body: Any, headers: dict[str, Any]) -> Any:
    """Return a JSON body, or the metadata of an upload that also carries content; None for anything else."""
    kind = next((str(value) for name, value in headers.items() if name.lower() == "content-type"), "")
    if not body or not isinstance(body, str | bytes):
        return None
    data = body.encode() if isinstance(body, str) else body
    try:
        if kind.startswith("multipart/related"):
            parts = message_from_bytes(f"Content-Type: {kind}\n\n".encode() + data).get_payload()
            first = parts[0] if isinstance(parts, list) else None
            return json.loads(str(first.get_payload())) if isinstance(first, Message) else None
        return json.loads(data) if "json" in kind else None
    except ValueError:
        return None


def _size(body: Any) -> int:
    return len(body.encode() if isinstance(body, str) else body) if isinstance(body, str | bytes) else 0


def _answer(content: bytes | str | None) -> Any:
    """Return the JSON of an answer, or the beginning of its text."""
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError:
        text = content.decode(errors="replace") if isinstance(content, bytes) else content
        return text[:MAX_TEXT]


def readme(recording: Recording) -> str:
    """Return the README of a recording: what it holds and what it does not."""
    rows = "\n".join(
        f"| {stage.name} | {stage.outcome} | {stage.began:.0f} | {stage.seconds:.1f} | {stage.detail} |"
        for stage in recording.stages
    )
    return f"""# Recording of `slipway witness`

`requests.jsonl` holds the requests of this machine to Google's APIs with their answers and times, in the order in which
they began, below one line about the whole; of equal answers in a row the first and the last.

Values that identify a project or a person are replaced by stand-ins, the same value always by the same one. Others'
VMs, TPUs, disks and buckets are left out, and so are values of metadata. The files were searched for the original
values before they were kept. Read them yourself before you publish them.

| stage | outcome | began (s) | took (s) | detail |
|---|---|---|---|---|
{rows}
"""

"""The recording of a first contact: every request and answer, the stages, and facts about the workers.

Raw values are only in memory, and those of others not even there. Each file is scrubbed as a whole before it is
written, and scanned after that.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from conf.strict_json import dumps
from controller.core.json_documents import Document, Record, stamped
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.witness.stand_ins import StandIns, omit_others

REQUESTS, STAGES, WORKERS, README = "requests.jsonl", "stages.json", "workers.json", "README.md"
REQUEST_HEADERS = frozenset({"content-type", "x-goog-user-project", "x-upload-content-length", "content-range"})
ANSWER_HEADERS = frozenset({
    "content-type", "retry-after", "date", "etag", "www-authenticate", "x-goog-generation", "x-goog-hash", "range",
})  # fmt: skip
"""Headers that are recorded; no other one is, so no token is."""
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
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Resources made or deleted in it: resource, title, action, outcome, began, seconds."""


class Recording:
    """Collects everything in memory and writes it to a folder, scrubbed. Thread-safe."""

    def __init__(self, folder: Path, clock: Clock, stand_ins: StandIns) -> None:
        self.folder, self.stand_ins = folder, stand_ins
        self.stages: list[Stage] = []
        self.workers: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        """Facts about the whole: cost, limits, versions, what is left."""
        self._clock, self._began = clock, clock.monotonic()
        self._lines: list[RequestLine] = []
        self._count = 0
        self._lock = threading.Lock()

    def seconds(self) -> float:
        """Return the seconds since the recording began."""
        return round(self._clock.monotonic() - self._began, 3)

    @property
    def stage(self) -> Stage | None:
        """Return the stage in progress."""
        return next((stage for stage in reversed(self.stages) if stage.outcome == "running"), None)

    @property
    def requests(self) -> list[RequestLine]:
        with self._lock:
            return sorted(self._lines, key=lambda line: line.number)

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

    def begin(self) -> int:
        """Return the number of a request that begins now."""
        with self._lock:
            self._count += 1
            return self._count

    def add(self, line: RequestLine) -> None:
        with self._lock:
            self._lines.append(line)

    def save(self) -> list[str]:
        """Write all files and scan them; return what the scan refused to keep, empty if all is well."""
        lines = [line.to_json() for line in self.requests]
        stages = stamped({**self.facts, "stages": [stage.to_json() for stage in self.stages]})
        workers = stamped({"guest_attributes": guest_attributes(self.requests), "workers": self.workers})
        for document in (*lines, stages, workers):
            self.stand_ins.learn(document)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        scrub = self.stand_ins.scrub
        self._write(REQUESTS, "".join(dumps(scrub(line)) + "\n" for line in lines))
        self._write(STAGES, dumps(scrub(stages), indent=1) + "\n")
        self._write(WORKERS, dumps(scrub(workers), indent=1) + "\n")
        self._write(README, self.stand_ins.scrub(readme(self)))
        return self._refuse_leaks()

    def _write(self, name: str, text: str) -> None:
        draft = self.folder / f".{name}.new"
        with open(draft, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(text)
        draft.replace(self.folder / name)

    def _refuse_leaks(self) -> list[str]:
        """Delete each file that still holds a known value, and say so."""
        refused = []
        for name in (REQUESTS, STAGES, WORKERS, README):
            file = self.folder / name
            leaks = {leak for line in _parts(file) for leak in self.stand_ins.leaks(line)}
            if leaks:
                file.unlink()
                refused.append(f"{name} was deleted: it still held what {', '.join(sorted(leaks))} stands for")
        return refused


def _parts(file: Path) -> list[str]:
    """Return the texts to scan: lines of JSON lines, else the whole file."""
    text = file.read_text()
    return text.splitlines() if file.suffix == ".jsonl" else [text]


class RecordedConnection:
    """An HTTP connection that records what passes; it sends exactly what it is given."""

    def __init__(self, http: Any, recording: Recording, method_id: str, root: str) -> None:
        self._http, self._recording, self._method_id, self._root = http, recording, method_id, root

    def __getattr__(self, name: str) -> Any:
        return getattr(self._http, name)

    def request(self, uri: str, method: str = "GET", body: Any = None, headers: Any = None, **options: Any) -> Any:
        recording = self._recording
        number, began, stage = recording.begin(), recording.seconds(), recording.stage
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
            recording.add(RequestLine(
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


def guest_attributes(lines: list[RequestLine]) -> list[dict[str, Any]]:
    """Return when each guest attribute of each worker was first seen, in that order."""
    seen: dict[tuple[str, int, str], dict[str, Any]] = {}
    for line in lines:
        if not line.method_id.endswith("nodes.getGuestAttributes") or line.status != 200 or not line.answer:
            continue
        for worker, found in enumerate(line.answer.get("guestAttributes", [])):
            for item in found.get("queryValue", {}).get("items", []):
                name = f"{item.get('namespace', '')}/{item.get('key', '')}"
                fact = {"node": line.path.partition(":")[0], "worker": worker, "name": name, "seen": line.began}
                seen.setdefault((fact["node"], worker, name), fact)
    return list(seen.values())


def readme(recording: Recording) -> str:
    """Return the README of a recording: what it holds and what it does not."""
    rows = "\n".join(
        f"| {stage.name} | {stage.outcome} | {stage.began:.0f} | {stage.seconds:.1f} | {stage.detail} |"
        for stage in recording.stages
    )
    return f"""# Recording of `slipway witness`

Attach this folder to an issue. It holds {len(recording.requests)} requests.

| file | content |
|---|---|
| `requests.jsonl` | every request of this machine to Google's APIs, and its answer, in the order in which they began |
| `stages.json` | the stages with times and outcome, the limits, the cost, what was left |
| `workers.json` | facts about each worker after its first boot, SSH times, when guest attributes appeared |

Values that identify a project or a person are replaced by stand-ins, the same value always by the same one: project and
number, organization and folder, addresses, keys, tokens, mail addresses, accounts, buckets, billing accounts, user
names. VMs, TPUs, disks and buckets without Slipway's label are left out of lists, and so are values of metadata that
Slipway did not set, except SSH keys and `enable-oslogin`. The files were
searched for the original values before they were kept. Read them yourself before you publish them.

Not recorded: token requests, the content of objects, the IAP tunnel and SSH, the workers' own requests to Cloud
Storage, the metadata server and the TPU API.

| stage | outcome | began (s) | took (s) | detail |
|---|---|---|---|---|
{rows}
"""

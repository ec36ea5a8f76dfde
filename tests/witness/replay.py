"""Send the requests of a recording to an emulated cloud, in their order, and collect every difference."""

import base64
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote, urlencode

from controller.witness.recording import RequestLine
from tests.witness import compare
from tests.witness.compare import Difference, Outcome

Send = Callable[[str, str, str, "bytes | None", dict[str, str]], tuple[int, Any]]
"""Sends (api, method, path with query, body, headers) and returns status and answer."""
READ_VERBS = ("getIamPolicy", "testIamPermissions", "getGuestAttributes", "wait")
PROJECT, NUMBER = "project-1", "100000000001"
"""Stand-ins of the project in every recording."""
LEARNED_KEYS = ("id", "etag", "fingerprint", "uniqueId", "projectNumber", "targetId", "selfLinkWithId", "name")
"""Keys whose values the emulated cloud chooses; they are mapped wherever the recording sends them back."""
SHORTEST_LEARNED = 4
KEY = re.compile(r"\bAAAAstandin(\d{4})A+")
BOUNDARY = "slipway-witness-replay"
POLL_SECONDS = 0.05
SAMPLED = 200
"""Lines after a change in which reads of its API are looked for, to see states that pass quickly."""


@dataclass
class Run:
    """Consecutive reads of one thing with the same answer."""

    lines: list[RequestLine]
    outcome: Outcome


@dataclass
class Report:
    differences: dict[tuple[str, str, str], Difference] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was not judged, and why."""
    sent: int = 0

    def add(self, *differences: Difference) -> None:
        for found in differences:
            self.differences.setdefault(found.key, found)

    def note(self, message: str) -> None:
        if message not in self.notes:
            self.notes.append(message)


class Replayer:
    """Replays one recording. `wait` is how long an answer may take to become the recorded one, in seconds."""

    def __init__(
        self, lines: list[RequestLine], send: Send, project: str, number: str, *, wait: float, operation: float
    ) -> None:
        self._lines, self._send, self._wait, self._operation = lines, send, wait, operation
        self._values = {PROJECT: project, NUMBER: number}
        self._generations: dict[tuple[str, str], str] = {}
        self._objects: set[str] = set()
        self._ahead: dict[str, Any] = {}
        self._samples: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._answers: dict[str, list[Any]] = defaultdict(list)
        self._late = set[str]()
        self._done = set[int]()
        self.report = Report()

    def run(self) -> Report:
        self._runs = {run.lines[0].number: run for run in read_runs(self._lines)}
        self._last_of = {run.lines[-1].number: run for run in self._runs.values()}
        self._run_of = {line.number: run for run in self._runs.values() for line in run.lines}
        changes = [line for line in self._lines if is_mutating(line)]
        for line in self._lines:
            if why := skipped(line):
                self.report.note(f"{line.method_id} not replayed: {why}")
            elif is_mutating(line):
                self._change(line)
            elif line.number not in self._done:
                self._read(line, concurrent=any(overlap(line, change) for change in changes))
        self._compare_sequences()
        return self.report

    def _change(self, line: RequestLine) -> None:
        recorded = compare.outcome(line.method_id, line.status, line.answer)
        key = key_of(line)
        if key in self._ahead:  # accepted at once what was recorded as refused at first
            if not recorded.is_refusal:
                self._judge(line, recorded, *self._ahead.pop(key))
            return
        answer, emulated = self._ask(line)
        deadline = time.monotonic() + self._wait
        while emulated.is_refusal and not recorded.is_refusal and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            answer, emulated = self._ask(line)
        if recorded.is_refusal and not emulated.is_refusal:
            self._ahead[key] = answer, emulated
        self._judge(line, recorded, answer, emulated)
        self._track_objects(line, emulated)
        if not emulated.is_refusal:
            self._sample(line)

    def _sample(self, change: RequestLine) -> None:
        """Look at once at what the change made: an operation may be over before the recording asks."""
        began = time.monotonic()
        if not change.method_id.startswith("tpu."):
            return
        following = [line for line in self._lines if change.number < line.number <= change.number + SAMPLED]
        reads = {
            key_of(line): line for line in following if line.method_id.startswith("tpu.") and not is_mutating(line)
        }
        for line in reads.values():
            if not skipped(line) and not line.method_id.endswith(("List", "list")):
                self._ask(line)
                if time.monotonic() - began > self._operation:
                    self._late.add(line.method_id)

    def _read(self, line: RequestLine, *, concurrent: bool) -> None:
        run = self._run_of[line.number]
        recorded = run.outcome
        self._put_objects_of_workers(line)
        answer, emulated = self._ask(line)
        is_last = line.number == run.lines[-1].number
        if not emulated.matches(recorded) and self._can_change(line, recorded, emulated):
            if not is_last:
                return  # the next line of the run asks again
            deadline = time.monotonic() + self._wait
            while not emulated.matches(recorded) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                answer, emulated = self._ask(line)
        self._done |= {each.number for each in run.lines}
        if not emulated.matches(recorded) and concurrent:
            self.report.note(f"{line.method_id} not judged: a change was under way when it was recorded")
            return
        self._judge(run.lines[-1], recorded, answer, emulated)

    def _can_change(self, line: RequestLine, recorded: Outcome, emulated: Outcome) -> bool:
        """Whether waiting may bring the recorded answer: not if it has passed already, nor for a list."""
        if recorded.is_refusal and recorded.status != 404 and not emulated.is_refusal:
            return False  # what is allowed now is not refused later
        if line.method_id.endswith("getGuestAttributes") and recorded.status == emulated.status:
            return not set(recorded.state.split(",")) <= {"", *emulated.state.split(",")}
        if compare.is_list(line.method_id) and recorded.status == emulated.status:
            return False
        return recorded.shown_state not in self._samples[line.method_id][key_of(line)][:-1]

    def _ask(self, line: RequestLine) -> tuple[Any, Outcome]:
        status, answer = self._send(*self._request(line))
        self.report.sent += 1
        found = compare.outcome(line.method_id, status, answer)
        self._samples[line.method_id][key_of(line)].append(found.shown_state)
        if line.method_id.endswith("getGuestAttributes"):
            self._answers[key_of(line)].append(answer)
        return answer, found

    def _judge(self, line: RequestLine, recorded: Outcome, answer: Any, emulated: Outcome) -> None:
        method_id = line.method_id
        if recorded.status != emulated.status:
            if self._was_shown(line, recorded):
                return
            subject = f"{line.method} {'/'.join(line.path.split('/')[-2:])}" + (
                f" {recorded.reason}" if recorded.reason else ""
            )
            self.report.add(Difference("status", method_id, subject, str(recorded), str(emulated)))
            return
        if recorded.is_refusal:
            if recorded.reason != emulated.reason:
                self.report.add(Difference("reason", method_id, str(recorded.status), recorded.reason, emulated.reason))
            said = replace(emulated, words=self._as_recorded(emulated.words))
            self.report.add(*compare.compare_words(method_id, recorded, said))
            return
        if recorded.state != emulated.state:
            if not compare.is_list(method_id) and not self._was_shown(line, recorded):
                shown = "+".join(sorted({s for states in self._samples[method_id].values() for s in states} - {""}))
                self.report.add(Difference("state", method_id, recorded.state, recorded.state, f"only {shown}"))
            return
        if isinstance(line.answer, dict) and isinstance(answer, dict):
            self._learn(line.answer, answer)
            if not any(self._objects_of_workers(line)):
                self.report.add(*compare.compare_fields(method_id, line.answer, answer))
            self._learn_generation(line, answer)

    def _was_shown(self, line: RequestLine, recorded: Outcome) -> bool:
        """Whether the emulated cloud has given this answer too, only at another time; or may have, unseen."""
        shown = {state for states in self._samples[line.method_id].values() for state in states}
        if recorded.shown_state in shown and not is_mutating(line):
            return True
        if line.method_id in self._late and recorded.status < 400:
            self.report.note(f"{line.method_id} {recorded.state} not judged: this machine was too slow to see it")
            return True
        return False

    def _request(self, line: RequestLine) -> tuple[str, str, str, bytes | None, dict[str, str]]:
        api = line.method_id.partition(".")[0]
        query = {name: self._mapped(value) for name, value in line.query.items()}
        for name in ("ifGenerationMatch", "generation"):
            if name in query:
                query[name] = self._generations.get((unquote(line.path), query[name]), query[name])
        body, headers = None, dict[str, str]()
        if "upload/" in line.path:
            body, kind = upload_body(self._mapped(line.body), line.body_bytes)
            query["uploadType"], headers = ("multipart" if line.body else "media"), {"Content-Type": kind}
        elif line.body is not None:
            body, headers = json.dumps(self._mapped(line.body)).encode(), {"Content-Type": "application/json"}
        path = "/".join(quote(self._mapped(unquote(part)), safe=":@$") for part in line.path.split("/"))
        return api, line.method, path + (f"?{urlencode(query)}" if query else ""), body, headers

    def _mapped(self, value: Any) -> Any:
        """The value with everything that the emulated cloud calls otherwise."""
        if isinstance(value, dict):
            return {name: self._mapped(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._mapped(inner) for inner in value]
        if not isinstance(value, str):
            return value
        names = "|".join(re.escape(name) for name in sorted(self._values, key=len, reverse=True))
        text = re.sub(rf"(?<![A-Za-z0-9-])(?:{names})(?![A-Za-z0-9-])", lambda found: self._values[found[0]], value)
        return KEY.sub(lambda found: public_key(int(found[1])), text)

    def _as_recorded(self, words: str) -> str:
        for name, value in sorted(self._values.items(), key=lambda item: -len(item[1])):
            words = words.replace(value, name)
        return words

    def _learn(self, recorded: Any, emulated: Any, key: str = "") -> None:
        """Learn from two answers to the same request what the emulated cloud calls things."""
        if isinstance(recorded, dict) and isinstance(emulated, dict):
            for name in recorded.keys() & emulated.keys():
                self._learn(recorded[name], emulated[name], name)
            if "members" in recorded and recorded.get("role") == emulated.get("role"):
                self._learn_members(recorded["members"], emulated.get("members", []))
        elif isinstance(recorded, list) and isinstance(emulated, list):
            for one, other in zip(recorded, emulated, strict=False):
                self._learn(one, other)
        elif isinstance(recorded, str) and isinstance(emulated, str) and key in LEARNED_KEYS and recorded != emulated:
            if key == "name":
                recorded, emulated = recorded.rpartition("/")[2], emulated.rpartition("/")[2]
                if not recorded.startswith("operation"):
                    return
            if len(recorded) >= SHORTEST_LEARNED:
                self._values[recorded] = emulated

    def _learn_members(self, recorded: list[str], emulated: list[str]) -> None:
        """The caller has another name in the emulated cloud; it must keep its roles."""
        for one, other in zip(recorded, emulated, strict=False):
            if one != other and one.startswith("user:") and other.startswith("user:"):
                self._values[one.removeprefix("user:")] = other.removeprefix("user:")

    def _learn_generation(self, line: RequestLine, answer: dict[str, Any]) -> None:
        """Learn the generations of one object, or of those in a list."""
        if not line.method_id.startswith("storage.objects."):
            return
        bucket = f"storage/v1/b/{line.path.split('/b/')[1].split('/')[0]}/o"
        mine = {item.get("name"): item for item in answer.get("items", [answer])}
        for item in line.answer.get("items", [line.answer]):
            other, name = mine.get(item.get("name"), {}), item.get("name")
            if "generation" in item and "generation" in other:
                for path in (f"upload/{bucket}", f"{bucket}/{name}"):
                    self._generations[path, item["generation"]] = other["generation"]

    def _track_objects(self, line: RequestLine, emulated: Outcome) -> None:
        if line.method_id == "storage.objects.insert" and not emulated.is_refusal:
            name = (line.body or {}).get("name") or line.query.get("name", "")
            self._objects.add(f"{line.path.split('/b/')[1].split('/')[0]}/{name}")

    def _objects_of_workers(self, line: RequestLine) -> Iterator[tuple[str, str]]:
        """Bucket and name of the objects of an answer that no recorded request has made."""
        if not line.method_id.startswith("storage.objects.") or line.status != 200:
            return
        bucket = line.path.split("/b/")[1].split("/")[0]
        if line.method_id == "storage.objects.list":
            names = [item.get("name", "") for item in (line.answer or {}).get("items", [])]
        else:
            names = [unquote(line.path.partition("/o/")[2])]
        yield from ((bucket, name) for name in names if name and f"{bucket}/{name}" not in self._objects)

    def _put_objects_of_workers(self, line: RequestLine) -> None:
        for bucket, name in list(self._objects_of_workers(line)):
            path = f"upload/storage/v1/b/{bucket}/o?" + urlencode({"uploadType": "media", "name": name})
            self._send("storage", "POST", path, b"0", {"Content-Type": "application/octet-stream"})

    def _compare_sequences(self) -> None:
        recorded: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        answers: dict[str, tuple[str, list[Any]]] = {}
        for line in self._lines:
            if skipped(line) or is_mutating(line):
                continue
            found = compare.outcome(line.method_id, line.status, line.answer)
            recorded[line.method_id][key_of(line)].append(found.shown_state)
            if line.method_id.endswith("getGuestAttributes"):
                answers.setdefault(key_of(line), (line.method_id, []))[1].append(line.answer)
        for method_id, by_key in recorded.items():
            if not compare.is_list(method_id):
                mine = list(self._samples[method_id].values())
                self.report.add(*compare.compare_order(method_id, list(by_key.values()), mine))
        for key, (method_id, theirs) in answers.items():
            self.report.add(*compare.compare_attributes(method_id, theirs, self._answers[key]))


def is_mutating(line: RequestLine) -> bool:
    return line.method not in ("GET", "HEAD") and not line.method_id.endswith(READ_VERBS)


def skipped(line: RequestLine) -> str:
    """Why a line cannot be replayed, empty if it can."""
    if line.status == 0:
        return "there was no answer"
    if line.status >= 500 or line.status in (408, 429):
        return f"{line.status} is a passing failure"
    if line.path.startswith("resumable/") or line.query.get("uploadType") == "resumable":
        return "it is part of a resumable upload"
    return ""


def key_of(line: RequestLine) -> str:
    """What makes two requests the same."""
    return json.dumps([line.method, line.path, line.query, line.body], sort_keys=True)


def overlap(line: RequestLine, change: RequestLine) -> bool:
    """Whether a request was answered while a change was under way, so that either order is possible."""
    return line.began <= change.began + change.seconds and change.began <= line.began + line.seconds


def read_runs(lines: list[RequestLine]) -> Iterator[Run]:
    """The reads of each thing, those with equal answers in a row as one."""
    latest: dict[str, Run] = {}
    for line in lines:
        if is_mutating(line) or skipped(line):
            continue
        found = compare.outcome(line.method_id, line.status, line.answer)
        run = latest.get(key_of(line))
        if run is not None and run.outcome.matches(found) and (found.is_refusal or found.state):
            run.lines.append(line)
            continue
        if run is not None:
            yield run
        latest[key_of(line)] = Run([line], found)
    yield from latest.values()


def upload_body(metadata: Any, size: int) -> tuple[bytes, str]:
    """Content of the recorded size, with the recorded metadata; and its type."""
    content = b"0" * max(1, min(size, 1 << 20))
    if not metadata:
        return content, "application/octet-stream"
    parts = (("application/json", json.dumps(metadata).encode()), ("application/octet-stream", content))
    body = b"".join(f"--{BOUNDARY}\r\nContent-Type: {kind}\r\n\r\n".encode() + part + b"\r\n" for kind, part in parts)
    return body + f"--{BOUNDARY}--".encode(), f"multipart/related; boundary={BOUNDARY}"


def public_key(number: int) -> str:
    """A public key in the place of a stand-in: any 32 bytes are one, as far as its form goes."""
    parts = (b"ssh-ed25519", number.to_bytes(32))
    return base64.b64encode(b"".join(len(part).to_bytes(4) + part for part in parts)).decode()

"""Send the requests of a recording to a fresh emulated cloud at their recorded times, and find every difference.

The time of that cloud is held: it passes by the gaps between the recorded requests, and further where the emulated
cloud has not come to an answer yet that was recorded.
"""

import base64
import json
import re
import tempfile
import urllib.error
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode
from urllib.request import ProxyHandler, Request, build_opener

from conf.strict_json import dumps
from controller import emulator
from controller.core.errors import CloudError
from controller.emulator import Emulator
from controller.witness import compare
from controller.witness.compare import Difference, Outcome, operations_out_of_range
from controller.witness.recording import RequestLine
from controller.witness.stand_ins import REMOVED, omit_others

FIELD_PACE = 30.0
"""`cloud.operation_seconds` with which the emulated cloud takes as long as Google."""
PROJECT, NUMBER = "project-1", "100000000001"
"""Stand-ins of the project in every recording."""
LEARNED_KEYS = ("id", "etag", "fingerprint", "uniqueId", "projectNumber", "targetId", "selfLinkWithId", "name")
"""Keys whose values the emulated cloud chooses; they are mapped wherever the recording sends them back."""
SHORTEST_LEARNED = 4
NO_SCRIPT = "#!/bin/true"
"""What is sent in place of a value that was not recorded, such as a startup script."""
KEY = re.compile(r"\bAAAAstandin(\d{4})A+")
BOUNDARY = "slipway-witness-replay"
PATIENCE = 600.0
"""Seconds at the field's pace for which an answer that was recorded is waited for."""
LOOKS = 60
"""How often it is asked for meanwhile."""
LOOKED_AT = 400
"""Requests after a change among which those of the changed resource are sent once more at once."""
HEADERS = ("retry-after", "www-authenticate")
"""Headers of answers whose presence is compared."""


@dataclass
class HeldCloud:
    """An emulated cloud whose time is held; `delays` is its table, the least and the worst seconds of each thing."""

    running: Emulator
    project: str
    number: str
    delays: dict[str, list[float]]

    def send(
        self, api: str, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], Any]:
        """Send a request to a path below the root of an API; return status, headers and JSON."""
        sent = {"Authorization": f"Bearer {self.running.token}", "X-Goog-User-Project": self.project, **headers}
        request = Request(self.running.roots[api] + path, data=body, headers=sent, method=method)  # noqa: S310
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=120) as answer:
                status, told, content = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, told, content = error.code, error.headers, error.read()
        try:
            document = json.loads(content) if content else None
        except ValueError:
            document = None
        return status, {name.lower(): value for name, value in told.items()}, document

    def move_on(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.running.post("clock", {"seconds": seconds})


@contextmanager
def held_cloud(pace: float) -> Iterator[HeldCloud]:
    """Start an emulated cloud that nobody has used before, at that pace, and wipe it after the block.

    Raises CloudError if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="slipway-witness-") as folder:
        state = Path(folder) / "state"
        status, words = emulator.run_emulator_verb(["start", "--held", f"--operation-seconds={pace}"], state)
        if status:
            raise CloudError(f"the emulated cloud did not start: {words.strip()}")
        try:
            found = json.loads((state / "endpoint.json").read_text())
            running = emulator.find_running(state)
            yield HeldCloud(running, found["project"], found["project_number"], running.get("delays"))
        finally:
            emulator.run_emulator_verb(["wipe"], state)


@dataclass
class Report:
    """What the replay of a recording found."""

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


def replay_recording(lines: Sequence[RequestLine], pace: float, *, is_googles: bool) -> Report:
    """Replay a recording that was made at that pace of the delays; Google's is FIELD_PACE.

    The emulated cloud's own may take longer than its table says, on a busy machine.
    """
    with held_cloud(pace) as cloud:
        report = Replayer(lines, cloud, pace).run()
        delays = {
            kind: (pace / FIELD_PACE * least, pace / FIELD_PACE * worst)
            for kind, (least, worst) in cloud.delays.items()
        }
        report.add(*operations_out_of_range(lines, delays, is_googles=is_googles))
    return report


class Replayer:
    """Replays one recording."""

    def __init__(self, lines: Sequence[RequestLine], cloud: HeldCloud, pace: float) -> None:
        self._lines, self._cloud = sorted(lines, key=lambda line: (line.moment, line.number)), cloud
        self._step = (PATIENCE * pace / FIELD_PACE + 1) / LOOKS
        self._values = {PROJECT: cloud.project, NUMBER: cloud.number, REMOVED: NO_SCRIPT}
        self._sent = "\n".join(unquote(line.path) + dumps([line.query, line.body]) for line in lines)
        """All that the recording sends; only what is in it is learned."""
        self._generations: dict[tuple[str, str], str] = {}
        self._objects = set[str]()
        self._ahead: dict[str, tuple[Any, Outcome]] = {}
        self._shown: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        """The states that the emulated cloud has shown, by method and request."""
        self._refused = set[tuple[str, int, str]]()
        """API, status and reason of its refusals."""
        self._doubts: list[tuple[RequestLine, Outcome, Difference]] = []
        self.report = Report()

    def run(self) -> Report:
        changes = [line for line in self._lines if line.is_change and line.status]
        # the emulated project is new: enable the APIs that the recorded one had before
        first = next((line for line in self._lines if line.method_id == "serviceusage.services.batchGet"), None)
        services = (first.answer or {}).get("services", []) if first and first.status == 200 else []
        if names := [one["name"].rpartition("/")[2] for one in services if one.get("state") == "ENABLED"]:
            body = dumps({"serviceIds": names[:20]}).encode()
            path = f"v1/projects/{self._cloud.project}/services:batchEnable"
            self._cloud.send("serviceusage", "POST", path, body, {"Content-Type": "application/json"})
            self._cloud.move_on(LOOKS * self._step)
        now = self._lines[0].began if self._lines else 0.0
        for number, line in enumerate(self._lines, 1):
            if why := line.passing:
                self.report.note(f"{line.method_id} not replayed: {why}")
                continue
            if (gap := line.moment - now) > 0:
                self._cloud.move_on(gap)
                now += gap
            self._replay(line, concurrent=not line.is_change and any(line.overlaps(change) for change in changes))
            if line.is_change and line.status < 400:
                self._look_at(line, self._lines[number : number + LOOKED_AT])
        for line, recorded, found in self._doubts:
            if not self._was_shown(line, recorded):
                self.report.add(found)
        self._compare_order()
        return self.report

    def _replay(self, line: RequestLine, *, concurrent: bool) -> None:
        recorded, key = compare.outcome(line.method_id, line.status, line.answer), line.key
        if key in self._ahead:  # accepted at once what was recorded as refused at first
            if not recorded.is_refusal:
                self._judge(line, recorded, *self._ahead.pop(key))
            return
        self._put_objects_of_workers(line)
        answer, emulated = self._ask(line)
        for _ in range(LOOKS):
            if emulated.matches(recorded) or not self._can_come(line, recorded, emulated):
                break
            self._cloud.move_on(self._step)
            answer, emulated = self._ask(line)
        if line.is_change and recorded.is_refusal and not emulated.is_refusal:
            self._ahead[key] = answer, emulated
        if concurrent and not emulated.matches(recorded) and {recorded.status, emulated.status} <= {200, 404}:
            self.report.note(f"{line.method_id} not judged: a change was under way when it was recorded")
            return
        self._judge(line, recorded, answer, emulated)
        if line.method_id == "storage.objects.insert" and not emulated.is_refusal:
            name = (line.body or {}).get("name") or line.query.get("name", "")
            self._objects.add(f"{_bucket(line)}/{name}")
        elif line.method_id == "storage.objects.delete" and not recorded.is_refusal:
            self._objects.discard(f"{_bucket(line)}/{unquote(line.path.partition('/o/')[2])}")

    def _look_at(self, change: RequestLine, following: Sequence[RequestLine]) -> None:
        """Look at once at what a change made of its resource: the state may have passed when the recording asks."""
        looks = [one for one in following if not (one.is_change or compare.is_list(one.method_id))]
        told = [one for one in looks if compare.outcome(one.method_id, one.status, one.answer).state]
        for line in {one.key: one for one in told if one.path.startswith(change.path)}.values():
            self._ask(line)

    def _can_come(self, line: RequestLine, recorded: Outcome, emulated: Outcome) -> bool:
        """Return whether waiting may bring the recorded answer: not if it has passed already, nor for a list."""
        if emulated.is_refusal and not recorded.is_refusal:
            return True
        refused = recorded.is_refusal and recorded.status != 404  # what is allowed now is not refused later
        if line.is_change or refused or compare.is_list(line.method_id):
            return False
        return recorded.shown_state not in self._shown[line.method_id][line.key][:-1]

    def _was_shown(self, line: RequestLine, recorded: Outcome) -> bool:
        """Return whether the emulated cloud has given this answer too, only at another time."""
        if recorded.is_refusal and recorded.status != 404:
            return (line.method_id.partition(".")[0], recorded.status, recorded.reason) in self._refused
        if line.is_change:
            return False
        of_key = self._shown[line.method_id]
        return any(recorded.shown_state in of_key[key] for key in ([line.key] if recorded.is_refusal else of_key))

    def _ask(self, line: RequestLine) -> tuple[Any, Outcome]:
        status, headers, answer = self._cloud.send(*self._request(line))
        answer = self._as_recorded(omit_others(line.method_id, answer))
        self.report.sent += 1
        found = compare.outcome(line.method_id, status, answer)
        self._shown[line.method_id][line.key].append(found.shown_state)
        if found.is_refusal:
            self._refused.add((line.method_id.partition(".")[0], found.status, found.reason))
        for name in HEADERS if status == line.status else ():
            told = ["there" if name in given else "nothing" for given in (line.answer_headers, headers)]
            if told[0] != told[1]:
                self.report.add(Difference("header", line.method_id, f"{name} of {status}", *told))
        return answer, found

    def _judge(self, line: RequestLine, recorded: Outcome, answer: Any, emulated: Outcome) -> None:
        method_id = line.method_id
        if recorded.status != emulated.status:
            where = f"{line.method} {'/'.join(line.path.split('/')[-2:])} {recorded.reason}".strip()
            self._doubts.append((line, recorded, Difference("status", method_id, where, str(recorded), str(emulated))))
        elif recorded.is_refusal:
            self.report.add(*compare.compare_refusals(method_id, recorded, emulated))
        elif recorded.state != emulated.state:
            if not compare.is_list(method_id):
                shown = Difference("state", method_id, recorded.state, recorded.state, emulated.state or "none")
                self._doubts.append((line, recorded, shown))
        else:
            self._learn(line.answer, answer)
            is_of_objects = method_id.startswith("storage.objects.")
            if is_of_objects and isinstance(line.answer, dict) and isinstance(answer, dict):
                self._learn_generation(line, answer)
            if not self._objects_of_workers(line) and not self._has_folder_of_workers(line):
                self.report.add(*compare.compare_fields(method_id, line.answer, self._as_recorded(answer)))

    def _request(self, line: RequestLine) -> tuple[str, str, str, bytes | None, dict[str, str]]:
        api, method, path = line.method_id.partition(".")[0], line.method, line.path
        query = {name: self._mapped(value) for name, value in line.query.items()}
        for name in ("ifGenerationMatch", "generation"):
            if name in query:
                query[name] = self._generations.get((unquote(path), query[name]), query[name])
        body, headers = None, dict[str, str]()
        if "upload/" in path:
            body, kind = _upload_body(self._mapped(line.body), line.body_bytes)
            query["uploadType"], headers = ("multipart" if line.body else "media"), {"Content-Type": kind}
        elif line.is_wait:  # time is held while a request is under way
            method, path = "GET", path.removesuffix("/wait")
        elif line.body is not None:
            body, headers = dumps(self._mapped(line.body)).encode(), {"Content-Type": "application/json"}
        path = "/".join(quote(self._mapped(unquote(part)), safe=":@$") for part in path.split("/"))
        return api, method, path + (f"?{urlencode(query)}" if query else ""), body, headers

    def _mapped(self, value: Any) -> Any:
        """Return a value with everything that the emulated cloud calls otherwise."""
        for found in KEY.finditer(dumps(value)):
            self._values.setdefault(found[0], _public_key(int(found[1])))
        return _renamed(value, self._values)

    def _as_recorded(self, answer: Any) -> Any:
        """Return an answer with the names of the recording."""
        return _renamed(answer, {theirs: ours for ours, theirs in self._values.items()})

    def _learn(self, recorded: Any, emulated: Any, key: str = "") -> None:
        """Learn from two answers to the same request what the emulated cloud calls things."""
        if isinstance(recorded, dict) and isinstance(emulated, dict):
            for name in recorded.keys() & emulated.keys():
                self._learn(recorded[name], emulated[name], name)
            if "members" in recorded and recorded.get("role") == emulated.get("role"):
                for one, other in zip(recorded["members"], emulated.get("members", []), strict=False):
                    if one.startswith("user:") and other.startswith("user:"):  # the caller, who must keep its roles
                        self._values[one.removeprefix("user:")] = other.removeprefix("user:")
        elif isinstance(recorded, list) and isinstance(emulated, list):
            for one, other in zip(recorded, emulated, strict=False):
                self._learn(one, other)
        elif isinstance(recorded, str) and isinstance(emulated, str) and key in LEARNED_KEYS and recorded != emulated:
            if key == "name":
                if not re.search(r"^operation|\boperations/", recorded):
                    return
                recorded, emulated = recorded.rpartition("/")[2], emulated.rpartition("/")[2]
            if len(recorded) >= SHORTEST_LEARNED and recorded in self._sent:
                self._values[recorded] = emulated

    def _learn_generation(self, line: RequestLine, answer: dict[str, Any]) -> None:
        """Learn the generations of one object, or of those in a list."""
        bucket = f"storage/v1/b/{_bucket(line)}/o"
        mine = {item.get("name"): item for item in answer.get("items", [answer])}
        for item in line.answer.get("items", [line.answer]):
            name = item.get("name")
            if "generation" in item and "generation" in (other := mine.get(name, {})):
                for path in (f"upload/{bucket}", f"{bucket}/{name}"):
                    self._generations[path, item["generation"]] = other["generation"]

    def _objects_of_workers(self, line: RequestLine) -> list[str]:
        """Return the names of the objects of an answer that no recorded request has made."""
        if not line.method_id.startswith("storage.objects.") or line.status != 200:
            return []
        names = [unquote(line.path.partition("/o/")[2])]
        if line.method_id == "storage.objects.list":
            names = [item.get("name", "") for item in (line.answer or {}).get("items", [])]
        return [name for name in names if name and f"{_bucket(line)}/{name}" not in self._objects]

    def _has_folder_of_workers(self, line: RequestLine) -> bool:
        """Return whether a list names a folder of objects that no recorded request has made."""
        folders = (line.answer or {}).get("prefixes", []) if line.method_id == "storage.objects.list" else []
        known = [[name.startswith(f"{_bucket(line)}/{folder}") for name in self._objects] for folder in folders]
        return not all(map(any, known))

    def _put_objects_of_workers(self, line: RequestLine) -> None:
        for name in self._objects_of_workers(line):
            path = f"upload/storage/v1/b/{_bucket(line)}/o?" + urlencode({"uploadType": "media", "name": name})
            self._cloud.send("storage", "POST", path, b"0", {"Content-Type": "application/octet-stream"})

    def _compare_order(self) -> None:
        recorded: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for line in self._lines:
            if not line.passing and not line.is_change and not compare.is_list(line.method_id):
                found = compare.outcome(line.method_id, line.status, line.answer)
                if found.status == 404 or found.state:
                    recorded[line.method_id][line.key].append(found.shown_state)
        for method_id, by_key in recorded.items():
            shown = list(self._shown[method_id].values())
            self.report.add(*compare.compare_order(method_id, list(by_key.values()), shown))


def _bucket(line: RequestLine) -> str:
    return line.path.split("/b/")[1].split("/")[0]


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """Return JSON data with other names in its texts; the keys of objects stay."""
    if isinstance(value, dict):
        return {name: _renamed(inner, names) for name, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, names) for inner in value]
    return _any_of(tuple(names)).sub(lambda found: names[found[0]], value) if isinstance(value, str) else value


@lru_cache(maxsize=4)
def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    longest = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<![A-Za-z0-9-])(?:{longest})(?![A-Za-z0-9-])")


def _upload_body(metadata: Any, size: int) -> tuple[bytes, str]:
    """Return content of the recorded size, with the recorded metadata; and its type."""
    content = b"0" * max(1, min(size, 1 << 20))
    if not metadata:
        return content, "application/octet-stream"
    parts = (("application/json", dumps(metadata).encode()), ("application/octet-stream", content))
    body = b"".join(f"--{BOUNDARY}\r\nContent-Type: {kind}\r\n\r\n".encode() + part + b"\r\n" for kind, part in parts)
    return body + f"--{BOUNDARY}--".encode(), f"multipart/related; boundary={BOUNDARY}"


def _public_key(number: int) -> str:
    """Return a public key in the place of a stand-in: any 32 bytes are one, as far as its form goes."""
    parts = (b"ssh-ed25519", number.to_bytes(32))
    return base64.b64encode(b"".join(len(part).to_bytes(4) + part for part in parts)).decode()

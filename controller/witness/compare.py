"""Compare answers as recorded with those of the emulated cloud, field by field; what chance names is aside."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from controller.witness.recording import RequestLine
from controller.witness.stand_ins import ADDRESS, REMOVED

END_OF_LIFE = ("404", "DELETING")
"""States after which a resource of the same name is another one."""
BY_CHANCE = frozenset({
    "id", "etag", "fingerprint", "uniqueId", "generation", "crc32c", "md5Hash", "size", "mediaLink", "progress",
    "usage", "targetId", "selfLinkWithId", "nextPageToken", "publicKey", "value", "lease",
})  # fmt: skip
"""Fields whose values no two clouds share; that they are there, and their types, is compared."""
NORMAL = (
    (re.compile(r"https?://[^/\s\"]+/"), "ROOT/"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:[\d:.]+(?:Z|[+-]\d\d:\d\d)"), "TIME"),
    (ADDRESS, "ADDRESS"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}\b|\b[0-9a-f]{32,}\b"), "ID"),
    (re.compile(r"\boperations?[-/][\w.-]+"), "OPERATION"),
    (re.compile(r"\d{10,}"), "NUMBER"),
)
"""Parts of values that name a time or a thing of one cloud, and what stands for them."""
MAX_CELL = 160
"""Characters of a value in the table."""


@dataclass(frozen=True)
class Difference:
    """One difference; two of the same kind, method and subject are one."""

    kind: str
    method_id: str
    subject: str
    recorded: str
    emulated: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.method_id, self.subject


@dataclass(frozen=True)
class Outcome:
    """What an answer says, apart from its fields."""

    status: int
    reason: str = ""
    words: str = ""
    state: str = ""

    @property
    def is_refusal(self) -> bool:
        return self.status >= 400

    def matches(self, other: "Outcome") -> bool:
        """Return whether both say the same; the words are compared separately."""
        return (self.status, self.reason, self.state) == (other.status, other.reason, other.state)

    def __str__(self) -> str:
        return " ".join(word for word in (str(self.status), self.reason, self.state) if word)

    @property
    def shown_state(self) -> str:
        """Return the state in a sequence of states: absent resources have one too."""
        return str(self.status) if self.is_refusal else self.state


def outcome(method_id: str, status: int, answer: Any) -> Outcome:
    if status >= 400:
        error = answer.get("error") if isinstance(answer, dict) else None
        error = error if isinstance(error, dict) else {}
        details = [*(error.get("details") or ()), *(error.get("errors") or ())]
        reasons = [error.get("status", ""), *[str(one["reason"]) for one in details if "reason" in one][:1]]
        return Outcome(status, " ".join(filter(None, reasons)), error.get("message", ""))
    return Outcome(status, state=state_of(method_id, answer))


def state_of(method_id: str, answer: Any) -> str:
    """Return the state that an answer reports: of a resource, of an operation, of what is in a list."""
    if not isinstance(answer, dict):
        return ""
    if method_id.endswith("getGuestAttributes"):
        workers = answer.get("guestAttributes", [answer])
        names = {
            f"{worker}/{item.get('namespace', '')}/{item.get('key', '')}"
            for worker, found in enumerate(workers)
            for item in found.get("queryValue", {}).get("items", [])
        }
        return ",".join(sorted(names))
    if isinstance(answer.get("done"), bool) or (method_id.endswith("operations.get") and "status" not in answer):
        return ("failed" if "error" in answer else "done") if answer.get("done") else "running"
    state = answer.get("state", answer.get("status"))
    if isinstance(state, dict):
        state = state.get("state")
    if isinstance(state, str):
        return state
    lists = [value for value in answer.values() if isinstance(value, list)]
    return "+".join(sorted({state_of("", item) for items in lists for item in items if isinstance(item, dict)} - {""}))


def is_list(method_id: str) -> bool:
    """Return whether an answer is about many things, whose states it mixes."""
    return method_id.endswith(("list", "List"))


def normal(value: Any) -> str:
    """Return a value as text, without what names a time or a thing of one cloud."""
    text = value if isinstance(value, str) else repr(value)
    for pattern, name in NORMAL:
        text = pattern.sub(name, text)
    return text


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every field; the elements of a list have the same path."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, f"{path}[]")


def compare_fields(method_id: str, recorded: Any, emulated: Any) -> Iterator[Difference]:
    """Yield fields that only one of two answers has, those of different types and those of different values."""
    theirs, ours = _by_path(recorded), _by_path(emulated)
    passing = tuple(f"{path}." for path in _other_states(recorded, emulated))
    for path in sorted(theirs.keys() | ours.keys()):
        if path.startswith(passing):
            continue
        parent = re.sub(r"(\[\]|\.?[^.\[\]]+)$", "", path)
        both = path in theirs and path in ours
        if (parent and not (parent in theirs and parent in ours)) or (path.endswith("[]") and not both):
            continue  # the parent is what differs, or its list is empty on one side
        mine, other = ours.get(path, []), theirs.get(path, [])
        if not both:
            yield Difference("field", method_id, path, _types(other) or "nothing", _types(mine) or "nothing")
        elif _types(mine) != _types(other):
            yield Difference("type", method_id, path, _types(other), _types(mine))
        elif path.rpartition(".")[2].rstrip("[]") not in BY_CHANCE and REMOVED not in other:
            plain = [{normal(one) for one in values if not isinstance(one, dict | list)} for values in (other, mine)]
            if plain[0] != plain[1]:
                shown = [", ".join(sorted(one - two)) for one, two in (plain, plain[::-1])]
                yield Difference("value", method_id, path, shown[0] or "less", shown[1] or "less")


def _by_path(answer: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for path, value in leaves(answer):
        found[path].append(value)
    return found


def _types(values: Iterable[Any]) -> str:
    return "/".join(sorted({"number" if type(v) in (int, float) else type(v).__name__ for v in values}))


def _other_states(recorded: Any, emulated: Any, path: str = "") -> Iterator[str]:
    """Yield paths of inner objects that were in another state, such as the resource in the answer of an operation."""
    if isinstance(recorded, dict) and isinstance(emulated, dict):
        if path and isinstance(recorded.get("state"), str) and recorded["state"] != emulated.get("state"):
            yield path
        for name in recorded.keys() & emulated.keys():
            yield from _other_states(recorded[name], emulated[name], f"{path}.{name}" if path else name)


def compare_refusals(method_id: str, recorded: Outcome, emulated: Outcome) -> Iterator[Difference]:
    """Yield what two refusals of the same status say otherwise; numbers in their words may differ."""
    if recorded.reason != emulated.reason:
        yield Difference("reason", method_id, str(recorded.status), recorded.reason, emulated.reason)
    said = [re.sub(r"\d+", "#", " ".join(normal(one.words).split())) for one in (recorded, emulated)]
    if said[0] != said[1]:
        yield Difference("words", method_id, str(recorded), recorded.words, emulated.words)


def compare_order(method_id: str, recorded: list[list[str]], emulated: list[list[str]]) -> Iterator[Difference]:
    """Yield neighbouring states of one life that the emulated cloud never showed in that order."""
    known = {state for states in emulated for state in states}
    ours, theirs = ([life for states in given for life in _lives(states)] for given in (emulated, recorded))
    shown = {pair for life in ours for pair in itertools.combinations([*life, "404"], 2)}
    for before, after in (pair for life in theirs for pair in itertools.pairwise(life)):
        if before in known and after in known and (before, after) not in shown:
            yield Difference("order", method_id, f"{before}, then {after}", "so", "never so")


def _lives(states: list[str]) -> list[list[str]]:
    """Split the states of one name into those of the resources that had it, one after the other."""
    lives: list[list[str]] = [[]]
    for state, _ in itertools.groupby(states):
        lives[-1].append(state)
        if state in END_OF_LIFE:
            lives.append([])
    return lives


def operations_out_of_range(
    lines: Iterable[RequestLine], delays: Mapping[str, tuple[float, float]], *, is_googles: bool
) -> Iterator[Difference]:
    """Yield the operations that took less than the least, or longer than the worst of the emulated cloud's delays.

    Args:
        lines: the recording.
        delays: least and worst seconds by `VERB COLLECTION`.
        is_googles: whether the worst is judged; an emulated cloud's own is exceeded on a busy machine.
    """
    begun: dict[str, tuple[RequestLine, str, float]] = {}
    for line in lines:
        answer = line.answer if isinstance(line.answer, dict) and line.status == 200 else {}
        about = answer["metadata"] if isinstance(answer.get("metadata"), dict) else {}
        verb, target = answer.get("operationType", about.get("verb")), answer.get("targetLink", about.get("target"))
        if not (isinstance(verb, str) and isinstance(target, str) and "/" in target):
            continue
        first, kind, running = begun.get(answer["name"], (line, f"{verb} {target.split('/')[-2]}", line.began))
        if not (answer.get("done") is True or answer.get("status") == "DONE"):
            begun[answer["name"]] = first, kind, line.began
        elif begun.pop(answer["name"], None):
            least, most = delays.get(kind, delays["other operation"])
            low, high = running - first.began - first.seconds, line.began + line.seconds - first.began
            if (is_googles and low > most) or high < least:
                said = f"{least:.3g} to {most:.3g} s"
                yield Difference("delay", first.method_id, kind, f"{max(low, 0.0):.3g} to {high:.3g} s", said)


def table(found: Iterable[Difference]) -> str:
    """Return the differences as a table in Markdown, to be pasted into an issue."""
    rows = [(one.kind, one.method_id, one.subject, one.recorded, one.emulated) for one in found]
    lines = ["| what | method | where | recorded | emulated |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in sorted(rows))]) + "\n"


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]}…"

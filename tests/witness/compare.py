"""Compare answers of Google, as recorded, with those of the emulated cloud: what differs, without values and times."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Path = str
END_OF_LIFE = ("404", "DELETING")
"""States after which a resource of the same name is another one."""


@dataclass(frozen=True)
class Difference:
    """One difference; two of the same kind, method and subject are one."""

    kind: str
    method_id: str
    subject: str
    recorded: str
    emulated: str

    def __str__(self) -> str:
        where = f"{self.method_id} {self.subject}".strip()
        return f"{self.kind}: {where}: recorded {self.recorded}, emulated {self.emulated}"

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
        """Whether both say the same; the words are compared separately."""
        return (self.status, self.reason, self.state) == (other.status, other.reason, other.state)

    def __str__(self) -> str:
        return " ".join(word for word in (str(self.status), self.reason, self.state) if word)

    @property
    def shown_state(self) -> str:
        """The state in a sequence of states: absent resources have one too."""
        return str(self.status) if self.is_refusal else self.state


def outcome(method_id: str, status: int, answer: Any) -> Outcome:
    if status >= 400:
        error = answer.get("error") if isinstance(answer, dict) else None
        error = error if isinstance(error, dict) else {}
        details = error.get("errors") or [{}]
        return Outcome(status, error.get("status") or details[0].get("reason") or "", error.get("message", ""))
    return Outcome(status, state=state_of(method_id, answer))


def state_of(method_id: str, answer: Any) -> str:
    """The state that an answer reports: of a resource, of an operation, of what is in a list."""
    if not isinstance(answer, dict):
        return ""
    if method_id.endswith("getGuestAttributes"):
        return ",".join(sorted(f"{worker}/{name}" for worker, name in attribute_names(answer)))
    if isinstance(answer.get("done"), bool) or method_id.endswith("operations.get"):
        return ("failed" if "error" in answer else "done") if answer.get("done") else "running"
    state = answer.get("state", answer.get("status"))
    if isinstance(state, dict):
        state = state.get("state")
    if isinstance(state, str):
        return state
    lists = [value for value in answer.values() if isinstance(value, list)]
    states = {state_of("", item) for items in lists for item in items if isinstance(item, dict)}
    return "+".join(sorted(states - {""}))


def is_list(method_id: str) -> bool:
    """Whether an answer is about many things, whose states it mixes."""
    return method_id.endswith(("list", "List", "getGuestAttributes"))


def attribute_names(answer: Any) -> Iterator[tuple[int, str]]:
    """Worker and name of each guest attribute of an answer."""
    for worker, found in enumerate(answer.get("guestAttributes", []) if isinstance(answer, dict) else []):
        for item in found.get("queryValue", {}).get("items", []):
            yield worker, f"{item.get('namespace', '')}/{item.get('key', '')}"


def field_types(value: Any, path: Path = "") -> dict[Path, str]:
    """The type of every field of an answer, by its path; the elements of a list count as one."""
    kind = "number" if type(value) in (int, float) else type(value).__name__
    found: dict[Path, str] = {path: kind} if path else {}
    if isinstance(value, dict):
        for name, inner in value.items():
            found |= field_types(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for inner in value:
            found |= field_types(inner, f"{path}[]")
    return found


def compare_fields(method_id: str, recorded: Any, emulated: Any) -> Iterator[Difference]:
    """Fields that only one of two answers has, and fields of different types."""
    ours, theirs = field_types(emulated), field_types(recorded)
    passing = tuple(f"{path}." for path in other_states(recorded, emulated))
    for path in sorted(theirs.keys() | ours.keys()):
        if path.startswith(passing):
            continue
        parent = re.sub(r"(\[\]|\.?[^.\[\]]+)$", "", path)
        if parent and (parent not in theirs or parent not in ours):
            continue  # the parent is what differs, or its list is empty on one side
        if path.endswith("[]") and not (path in theirs and path in ours):
            continue  # so is this list
        if path not in ours:
            yield Difference("field", method_id, path, theirs[path], "nothing")
        elif path not in theirs:
            yield Difference("field", method_id, path, "nothing", ours[path])
        elif ours[path] != theirs[path]:
            yield Difference("type", method_id, path, theirs[path], ours[path])


def other_states(recorded: Any, emulated: Any, path: Path = "") -> Iterator[Path]:
    """Paths of inner objects that were in another state, such as the resource in the answer of an operation."""
    if isinstance(recorded, dict) and isinstance(emulated, dict):
        if path and isinstance(recorded.get("state"), str) and recorded["state"] != emulated.get("state"):
            yield path
        for name in recorded.keys() & emulated.keys():
            yield from other_states(recorded[name], emulated[name], f"{path}.{name}" if path else name)


def normalized(words: str) -> str:
    """A message without the numbers in it, which differ between two runs."""
    return re.sub(r"\d+", "#", " ".join(words.split()))


def compare_words(method_id: str, recorded: Outcome, emulated: Outcome) -> Iterator[Difference]:
    if recorded.is_refusal and normalized(recorded.words) != normalized(emulated.words):
        subject = str(recorded)
        yield Difference("words", method_id, subject, repr(recorded.words), repr(emulated.words))


def precedence(states: list[str]) -> set[tuple[str, str]]:
    """Every pair of states of one life of which the first was seen before the second; every life ends with 404."""
    pairs: set[tuple[str, str]] = set()
    for life in lives(states):
        pairs |= {(a, b) for i, a in enumerate(life) for b in [*life[i + 1 :], "404"] if a != b}
    return pairs


def lives(states: list[str]) -> Iterator[list[str]]:
    """Split the states of one name into those of the resources that had it, one after the other."""
    life: list[str] = []
    for state in states:
        if life and life[-1] in END_OF_LIFE and state != life[-1]:
            yield life
            life = []
        if not life or life[-1] != state:
            life.append(state)
    if life:
        yield life


def compare_order(method_id: str, recorded: list[list[str]], emulated: list[list[str]]) -> Iterator[Difference]:
    """Neighbouring states that the emulated cloud never showed in that order."""
    known = {state for states in emulated for state in states}
    shown = set[tuple[str, str]]().union(*map(precedence, emulated))
    for states in recorded:
        for life in lives(states):
            for before, after in itertools.pairwise(life):
                if before in known and after in known and (before, after) not in shown:
                    yield Difference("order", method_id, f"{before}, then {after}", "so", "never so")


def compare_attributes(method_id: str, recorded: list[Any], emulated: list[Any]) -> Iterator[Difference]:
    """Guest attributes that only one side has, and the order in which they appear on the recorded side."""
    theirs, ours = first_seen(recorded), first_seen(emulated)
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in ours or name not in theirs:
            has = ("published", "absent") if name in theirs else ("absent", "published")
            yield Difference("attribute", method_id, f"{name[1]} of worker {name[0]}", *has)
    both = sorted(theirs.keys() & ours.keys(), key=lambda name: (theirs[name], name))
    for before, after in itertools.pairwise(both):
        if theirs[before] < theirs[after] and ours[before] >= ours[after]:
            how = "together" if ours[before] == ours[after] else "the other way round"
            subject = f"{before[1]} of worker {before[0]}, then {after[1]} of worker {after[0]}"
            yield Difference("attribute order", method_id, subject, "so", how)


def first_seen(answers: list[Any]) -> dict[tuple[int, str], int]:
    """For each guest attribute the number of the answer that first had it."""
    found: dict[tuple[int, str], int] = {}
    for number, answer in enumerate(answers):
        for name in attribute_names(answer):
            found.setdefault(name, number)
    return found

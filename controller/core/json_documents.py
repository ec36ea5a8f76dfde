"""JSON documents: versioned ones in the bucket and on this machine, files of lines, and what other processes answer.

Keys on disk are fixed, Python names are not.
"""

import fcntl
import os
import time
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Any, ClassVar, Self, get_args, get_origin

from conf.formats import FORMAT, format_problem
from conf.strict_json import dumps, loads, restored
from controller.core.errors import SlipwayError
from controller.core.text import finite_number, one_line

Body = dict[str, Any]


class UnreadableError(SlipwayError):
    """A document cannot be read, of whichever of the two kinds."""

    exit_code = 2


class FormatError(UnreadableError):
    """A document has a format that this version of Slipway cannot read. It is kept: a later one can."""


class DamagedRecordError(UnreadableError, ValueError):
    """A document in the bucket or on this machine is not what Slipway wrote there. It may be replaced."""


def stamped(body: Body) -> Body:
    """Return the document with its format as the first key."""
    return {"format": FORMAT, **body}


def checked(body: Any, where: str) -> Body:
    """Return the document, as it was before `dump`, without its format.

    Raises FormatError if the format is missing or unknown.
    """
    if problem := format_problem(body, where):
        raise FormatError(problem)
    return {key: value for key, value in restored(body).items() if key != "format"}


class Record:
    """Dataclass stored as a JSON object, one key per field: the field's name, or what `KEYS` says."""

    KEYS: ClassVar[Mapping[str, str]] = {}

    def to_json(self) -> Body:
        values = ((self.KEYS.get(each.name, each.name), getattr(self, each.name)) for each in _fields(self))
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values}

    @classmethod
    def from_json(cls, body: Any, where: str = "") -> Self:
        """Parse what `to_json` wrote; keys of a later Slipway are ignored."""
        values = ((each, body[cls.KEYS.get(each.name, each.name)]) for each in _fields(cls))
        return cls(**{each.name: tuple(value) if each.default == () else value for each, value in values})


class Document(Record):
    """Record in a file or object of its own, with its format."""

    def to_json(self) -> Body:
        return stamped(super().to_json())

    @classmethod
    def from_json(cls, body: Any, where: str = "") -> Self:
        """Parse what `to_json` wrote. Raises FormatError if the format is missing or unknown."""
        return super().from_json(checked(body, where or cls.__name__.lower()))


def _fields(document: Any) -> tuple[Field[Any], ...]:
    return fields(document)


def dump(body: Body, indent: int | None = None) -> str:
    """Serialize a document as JSON, with its format."""
    return dumps(stamped(body), indent=indent)


def has_format(body: Any) -> bool:
    """Return whether this is a Slipway document at all: others can write to the bucket too."""
    return isinstance(body, dict) and "format" in body


def load(content: str | bytes, where: str) -> Body:
    """Parse what `dump` wrote. Raises FormatError for a missing or unknown format, DamagedRecordError without JSON."""
    return checked(load_json(content, where), where)


def load_json(content: str | bytes, where: str) -> Any:
    """Parse JSON. Raises DamagedRecordError if it is none."""
    try:
        return loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(f"{where} is damaged: no JSON ({error})") from None


LOCK_SECONDS = 0.05
"""How long a file of the state folder is waited for. An append takes far less, unless its process is stopped."""


def try_lock(file: IO[bytes]) -> bool:
    """Lock a file against other processes until it is closed; return whether that was possible within LOCK_SECONDS."""
    late = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= late:
                return False
            time.sleep(LOCK_SECONDS / 10)
        except OSError:  # a file system without locks
            return False
        else:
            return True


def append_lines(file: Path, text: str) -> None:
    """Append whole lines; a line that was cut short by a crash is left on its own. An OSError names the file."""
    if not text:
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with file.open("a+b") as out:
            try_lock(out)  # controllers of several runs append at the same time; unlocked, it is one write at the end
            if out.seek(0, os.SEEK_END):
                out.seek(-1, os.SEEK_END)
                text = text if out.read() == b"\n" else f"\n{text}"
            out.write(text.encode())
    except OSError as error:
        error.filename = error.filename or str(file)  # that of a full disk names none
        raise


def replace_file(file: Path, content: str | bytes) -> None:
    """Write a whole file, and its folder: a reader finds the old one or the new one. An OSError names the file."""
    draft = file.with_name(f".{file.name}.{os.urandom(16).hex()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(file)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        error.filename = str(file)
        raise


MAX_DEPTH = 64
"""Levels of nesting of a value of any type; deeper ones could exhaust the stack of whoever writes them again."""


def type_problem(value: Any, kind: Any, name: str = "it") -> str:
    """Return how a value differs from a type, naming the part that does; "" if it does not.

    Args:
        value: parsed JSON.
        kind: a TypedDict, dict, list, union, Any or a JSON type; integers are floats too. Unknown keys are allowed.
        name: of the value, for the message.
    """
    if kind is Any:
        return "" if _is_shallow(value, MAX_DEPTH) else f"{name} is nested too deeply"
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (typing.Union, UnionType):
        problems = [type_problem(value, each, name) for each in inner if (each is NoneType) == (value is None)]
        return "" if "" in problems else (problems or [_differs(name, value)])[0]
    if typing.is_typeddict(kind):
        if not isinstance(value, dict):
            return _differs(name, value)
        hints = _hints(kind)
        if missing := sorted(kind.__required_keys__ - value.keys()):
            return f"{name} has no {missing[0]}"
        return _first(type_problem(value[key], hint, f"{name}.{key}") for key, hint in hints.items() if key in value)
    accepted = (int, float) if origin is float else (origin,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and origin is not bool):
        return _differs(name, value)
    if origin is float and finite_number(value) is None:
        return f"{name} is no finite number"
    if isinstance(value, list) and inner:
        return _first(type_problem(each, inner[0], f"{name}[{i}]") for i, each in enumerate(value))
    if isinstance(value, dict) and inner:
        return _first(type_problem(each, inner[1], f"{name}.{one_line(key):.40}") for key, each in value.items())
    return ""


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _first(problems: typing.Iterable[str]) -> str:
    return next((problem for problem in problems if problem), "")


def _differs(name: str, value: Any) -> str:
    return f"{name} is {type(value).__name__}"


def _is_shallow(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested at most so many levels deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)

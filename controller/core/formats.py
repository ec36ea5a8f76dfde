"""Versioned JSON documents in the bucket and on this machine. Keys on disk are fixed, Python names are not."""

import json
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, ClassVar, Self

from conf.formats import FORMAT, format_problem
from controller.core.errors import SlipwayError

Body = dict[str, Any]


class FormatError(SlipwayError):
    """A document has a format that this version of Slipway cannot read."""

    exit_code = 2


class DamagedRecordError(SlipwayError, ValueError):
    """A document in the bucket or on this machine is not what Slipway wrote there."""

    exit_code = 2


def stamped(body: Body) -> Body:
    """Return the document with its format as the first key."""
    return {"format": FORMAT, **body}


def checked(body: Any, where: str) -> Body:
    """Return the document without its format. Raises FormatError if the format is missing or unknown."""
    if problem := format_problem(body, where):
        raise FormatError(problem)
    return {key: value for key, value in body.items() if key != "format"}


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
    return json.dumps(stamped(body), indent=indent)


def has_format(body: Any) -> bool:
    """Return whether this is a Slipway document at all: others can write to the bucket too."""
    return isinstance(body, dict) and "format" in body


def load(content: str | bytes, where: str) -> Body:
    """Parse what `dump` wrote. Raises FormatError for a missing or unknown format, DamagedRecordError without JSON."""
    return checked(load_json(content, where), where)


def load_json(content: str | bytes, where: str) -> Any:
    """Parse JSON. Raises DamagedRecordError if it is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(f"{where} is damaged: no JSON ({error})") from None

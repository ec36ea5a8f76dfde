"""Versioned JSON documents in the bucket and on this machine. Keys on disk are fixed, Python names are not."""

import json
from typing import Any

from conf.formats import FORMAT, format_problem
from controller.core.errors import SlipwayError

Body = dict[str, Any]


class FormatError(SlipwayError):
    """A document has a format that this version of Slipway cannot read."""

    exit_code = 2


def stamped(body: Body) -> Body:
    """Return the document with its format as the first key."""
    return {"format": FORMAT, **body}


def checked(body: Any, where: str) -> Body:
    """Return the document without its format. Raises FormatError if the format is missing or unknown."""
    if problem := format_problem(body, where):
        raise FormatError(problem)
    return {key: value for key, value in body.items() if key != "format"}


def dump(body: Body, indent: int | None = None) -> str:
    """Serialize a document as JSON, with its format."""
    return json.dumps(stamped(body), indent=indent)


def has_format(body: Any) -> bool:
    """Return whether this is a Slipway document at all: others can write to the bucket too."""
    return isinstance(body, dict) and "format" in body


def load(content: str | bytes, where: str) -> Body:
    """Parse what `dump` wrote.

    Raises:
        FormatError: the format is missing or unknown.
        ValueError: the text is not JSON.
    """
    return checked(json.loads(content), where)

"""Documents in the bucket and on this machine, each with its format: Python names are free, keys on disk are not."""

from __future__ import annotations

import json
from typing import Any

from conf.formats import FORMAT, format_problem
from controller.core.errors import SlipwayError

Body = dict[str, Any]


class FormatError(SlipwayError):
    """A document has a format that this slipway does not read."""

    exit_code = 2


def stamped(body: Body) -> Body:
    """Return the document with its format, as the first key."""
    return {"format": FORMAT, **body}


def checked(body: Any, where: str) -> Body:
    """Return the document without its format.

    Raises:
        FormatError: it has another one, or none.
    """
    if problem := format_problem(body, where):
        raise FormatError(problem)
    return {key: value for key, value in body.items() if key != "format"}


def dump(body: Body, indent: int | None = None) -> str:
    """Return a document as JSON, with its format."""
    return json.dumps(stamped(body), indent=indent)


def has_format(body: Any) -> bool:
    """Return whether this is a document of slipway at all: others can write to the bucket as well."""
    return isinstance(body, dict) and "format" in body


def load(content: str | bytes, where: str) -> Body:
    """Parse what `dump` wrote.

    Raises:
        FormatError: it has another format, or none.
        ValueError: it is not JSON.
    """
    return checked(json.loads(content), where)

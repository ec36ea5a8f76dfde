"""What comes from a worker cannot steer the terminal that it is shown on.

A program prints what it likes, and a terminal takes some of that for orders: to hide what was there, to set the title,
to answer as if it had been typed. https://unicode.org/reports/tr36/ says the same of marks that turn text around.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All control characters but tab, newline and carriage return (progress bars live by it), and bidirectional ones."""


def printable(text: str) -> str:
    """The text without colours, and what would steer a terminal shown as `\\x1b`."""
    return CONTROL_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], COLOUR.sub("", text))


class SanitizedStream:
    """A stream that is a terminal; what is printed there only shows."""

    def __init__(self, stream: Any) -> None:
        self.unsanitized = stream
        """For who draws on it."""

    def write(self, text: str) -> int:
        self.unsanitized.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unsanitized, name)


def unsanitized_stream(stream: Any) -> Any:
    """The stream for somebody who draws, and takes care of what comes from elsewhere."""
    return stream.unsanitized if isinstance(stream, SanitizedStream) else stream


@contextmanager
def sanitized_output() -> Iterator[None]:
    """For as long as this lasts, stdout and stderr are `Terminal`s where they are terminals."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (SanitizedStream(stream) if stream.isatty() else stream for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before

"""Sanitize the output of workers, so that it cannot control the user's terminal.

Escape sequences could hide text, set the title, or answer as if it had been typed. Bidirectional characters can
reorder text: https://unicode.org/reports/tr36/
"""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Bidirectional characters, separators of lines, halves of surrogate pairs, and control characters except tab, newline
and carriage return (for progress bars)."""


def printable(text: str) -> str:
    r"""Return the text without colours, with other control characters escaped as `\x1b`."""
    return CONTROL_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], COLOUR.sub("", text))


def one_line(text: str) -> str:
    r"""Return the text as a cell of a table: all that does not print, a line break too, escaped as `\n`."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class SanitizedStream:
    """Terminal stream that escapes control characters."""

    def __init__(self, stream: Any) -> None:
        self.unsanitized = stream
        """The original stream, for code that draws on the terminal."""

    def write(self, text: str) -> int:
        self.unsanitized.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unsanitized, name)


def unsanitized_stream(stream: Any) -> Any:
    """Return the stream for code that draws on the terminal and escapes foreign text itself."""
    return stream.unsanitized if isinstance(stream, SanitizedStream) else stream


@contextmanager
def sanitized_output() -> Iterator[None]:
    """Sanitize stdout and stderr inside the block where they are terminals; a file gets what it cannot hold escaped."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (SanitizedStream(stream) if stream.isatty() else stream for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before

"""A terminal that remembers what was written to it."""

from __future__ import annotations

import io


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True

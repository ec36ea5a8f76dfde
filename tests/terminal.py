"""A terminal that remembers what was written to it."""

import io


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True

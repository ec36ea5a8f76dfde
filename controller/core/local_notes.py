"""This machine's own notes of runs. The bucket has all that counts, so a disk that does not take them ends no run."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from controller.core.events import Event, Events
from controller.core.json_documents import append_lines, replace_file

OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""Errors of a whole disk, which are said once; others are said of each file."""


class LocalNotes:
    """Writes files of the state folder; what goes wrong is said once, and everything else goes on."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._said = set[int | Path]()
        self._written = set[Path]()

    @contextmanager
    def best_effort(self, file: Path) -> Iterator[None]:
        """Go on after the block although it could not write the file."""
        try:
            yield
        except OSError as error:
            self._say(error.errno if error.errno in OF_THE_DISK else file, f"{file}: {error.strerror or error}")

    def append(self, file: Path, text: str) -> None:
        """Append whole lines. A file that was deleted meanwhile begins anew."""
        with self.best_effort(file):
            if file in self._written and not file.exists():
                self._say(file, f"{file} was deleted; it begins anew")
            append_lines(file, text)
            self._written.add(file)

    def write(self, file: Path, content: str | bytes) -> None:
        """Write a whole file, or leave it as it is."""
        with self.best_effort(file):
            replace_file(file, content)

    def listener(self, file: Path) -> Callable[[Event], None]:
        """Return a listener that appends events to a file, except program output, which is in the logs."""

        def write(event: Event) -> None:
            if event.kind not in ("log", "metrics", "progress"):
                self.append(file, event.as_json() + "\n")

        return write

    def _say(self, of: int | Path, message: str) -> None:
        """Say it once; this is also called while an event is passed on."""
        if of not in self._said:
            self._said.add(of)
            why = "this machine's notes are not complete; the run goes on, and the bucket has its records"
            self._events.note("run.state_dir", f"warning: {message}: {why}")

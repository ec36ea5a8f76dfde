"""Of which day the facts in the files of `conf/` are: Google's tables, images, prices, permissions, locks of packages.

A line of the file says it, `# as of DATE: WHAT`, with the source in brackets. A date may lack the day, or the month.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import conf

FOLDER = Path(conf.__file__).parent
UNDATED = frozenset({"config.yaml", "laptop.txt"})
"""Files beside the tables and locks: they hold no facts of others."""
LINE = re.compile(r"^# as of (\d{4}(?:-\d\d){0,2}): (\S.*)$", re.MULTILINE)


class UndatedError(ValueError):
    """A table or a lock does not say of which day it is."""


@dataclass(frozen=True)
class Facts:
    """Some facts of a file; `written`: their date as it is written."""

    file: str
    what: str
    written: str

    @property
    def since(self) -> date:
        """The first day that the date may mean."""
        year, month, day = (*map(int, self.written.split("-")), 1, 1)[:3]
        return date(year, month, day)


def dated_files(folder: Path = FOLDER) -> list[Path]:
    """Return the tables and locks."""
    return [file for file in sorted((*folder.glob("*.yaml"), *folder.glob("*.txt"))) if file.name not in UNDATED]


def facts_of(file: Path) -> list[Facts]:
    """Return what a file says of its facts. Raises UndatedError if it says nothing."""
    found = [Facts(file.name, what, written) for written, what in LINE.findall(file.read_text())]
    if not found:
        raise UndatedError(f"{file} does not say of which day it is: add a line `# as of 2026-11-29: what (source)`")
    return found


def all_facts(folder: Path = FOLDER) -> Iterator[Facts]:
    """Yield the facts of all tables and locks. Raises UndatedError."""
    for file in dated_files(folder):
        yield from facts_of(file)

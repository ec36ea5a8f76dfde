"""Format text for people."""

import difflib
from collections.abc import Set


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: `1 worker`, `4 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nearest_names(wanted: str, names: Set[str]) -> str:
    """Return up to four of the names, those that resemble the wanted one if any do; empty if there are none."""
    return ", ".join(difflib.get_close_matches(wanted, sorted(names), n=4, cutoff=0.3) or sorted(names)[:4])

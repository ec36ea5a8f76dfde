"""What a report keeps of files that grow: a bounded number of values, and a few transcripts, however long a run is."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
MOST, FEWEST = 4000, 1000
"""Values that are kept of a longer curve, of which a page draws at most MAX_POINTS (curves.py)."""
MAX_TRANSCRIPTS = 4


class Thinned(dict[float, T]):
    """Values by position. Beyond MOST, a few of those that are close together stay: up to FEWEST times three.

    They are the one that was told last, as an attempt that goes back replaces what an earlier one told, and of numbers
    the first lowest and the first highest, so that a rare value is not lost; a value rather than None. The values at
    the first and at the last position always stay.
    """

    def add(self, at: float, value: T) -> None:
        self[at] = value
        if len(self) > MOST:
            self._thin()

    def _thin(self) -> None:
        first, last = min(self), max(self)
        # a power of two, so that later gaps hold whole ones
        gap = math.ldexp(1.0, math.frexp(last / FEWEST - first / FEWEST)[1])
        near: dict[float, list[tuple[float, T]]] = {}
        for at, value in self.items():
            near.setdefault(at // gap, []).append((at, value))
        thinned = {end: self[end] for end in (first, last)}
        for found in near.values():
            told = [one for one in found if one[1] is not None] or found[:1]
            thinned |= [told[-1], *_extremes(told)]
        self.clear()
        self.update(sorted(thinned.items(), key=lambda item: item[0]))


def _extremes(told: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """Return the first of the lowest and of the highest numbers; nothing of other values."""
    if not isinstance(told[0][1], int | float):
        return []
    ordered = sorted(told, key=lambda one: one[0])
    return [choose(ordered, key=lambda one: one[1]) for choose in (min, max)]


def sample_transcripts(read: Callable[[], Iterable[dict[str, Any]]]) -> tuple[list[dict[str, Any]], int]:
    """Return the first questions of the last step, each after its answer at the first step that has it, and the count.

    It reads twice, the second time until it has found the answers.
    """
    ends, when, count, firsts = list[dict[str, Any]](), None, 0, dict[str, dict[str, Any]]()
    for count, row in enumerate(read(), 1):  # noqa: B007 (the count is what is wanted)
        if (now := (row.get("step"), row.get("phase"))) != when:
            ends, when = [], now
        if len(ends) < MAX_TRANSCRIPTS:
            ends.append(row)
    asked = {_question(end) for end in ends}
    for row in read() if asked else ():
        if (found := _question(row)) in asked:
            firsts.setdefault(found, row)
        if len(firsts) == len(asked):
            break
    pairs = ((firsts.get(_question(end), end), end) for end in ends)
    return [row for first, end in pairs for row in ([first, end] if first != end else [end])], count


def _question(row: dict[str, Any]) -> str:
    return repr((row.get("phase"), row.get("prompt")))

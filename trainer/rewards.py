"""Rewards: plain functions of (response, right answer), by name in one dict.

An answer is the last one a response gives: after `####`, in `\\boxed{…}`, else its last number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

Reward = Callable[[str, str], float]

MARKED = re.compile(r"####\s*(?P<hashes>[^\n]+)|\\f?boxed\s*\{(?P<box>[^{}]*)\}")
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+(?:\.\d+)?)?")
LONGEST = 10_000
"""Characters of a response that are looked at, from its end: a reward must not take long."""


def answer_match(response: str, answer: str) -> float:
    """1 if the response's answer is right: as a number where both are numbers (18.00, $18, 1,800), else as text."""
    given = extract(response)
    if given is None:
        return 0.0
    left, right = number(given), number(answer)
    if left is not None and right is not None:
        return float(left == right)
    return float(given.strip().casefold() == answer.strip().casefold())


def answer_format(response: str, answer: str) -> float:
    """1 if the response marks its answer, with `####` or a box, right or wrong."""
    return float(MARKED.search(response[-LONGEST:]) is not None)


def extract(response: str) -> str | None:
    """The last marked answer of a response, else its last number; None if it has neither."""
    tail = response[-LONGEST:].replace("{,}", ",")  # the comma of 1{,}800, as TeX wants it
    marked = [m["hashes"] or m["box"] or "" for m in MARKED.finditer(tail)]
    marked = [text for text in marked if text.strip()]
    if marked:
        return marked[-1].strip()
    numbers = NUMBER.findall(tail)
    return numbers[-1] if numbers else None


def number(text: str) -> Fraction | None:
    """The one number in a text, whatever unit or currency stands beside it; None if there is none, or more than one.

    None, too, for a division by zero and for more digits than Python turns into a number (4300).
    """
    found = NUMBER.findall(text)
    if len(found) != 1:
        return None
    above, _, below = found[0].replace(",", "").replace(" ", "").partition("/")
    try:
        return Fraction(above) / Fraction(below or "1")
    except (ValueError, ZeroDivisionError):
        return None


REWARDS: dict[str, Reward] = {"answer_match": answer_match, "answer_format": answer_format}

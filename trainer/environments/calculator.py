"""Calculator: the policy writes `47*83=`, reads the result, and then writes its answer.

The questions are products of numbers of equal length, some pairs of which are held out.
"""

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

CALL = re.compile(r"(?<!\d)(\d{1,12})([-+*])(\d{1,12})=$", re.ASCII)
"""A call ends the turn, by `loop.sampler.stop=["="]`."""
UNREADABLE = "?"
HELD_OUT_FRACTION = 0.2


class Calculator:
    """One question. The reward is 1 if the number that the policy writes in its last turn is the answer."""

    def __init__(self, *, digits: int = 0) -> None:
        """digits: results have leading zeros up to this length."""
        self.digits, self.calls, self.unreadable, self.answer, self.said = digits, 0, 0, "", ""

    def reset(self, row: Mapping[str, Any]) -> str:
        self.answer = str(row["answer"])
        return ""

    def step(self, response: str) -> tuple[str, bool]:
        if not response.endswith("="):
            self.said = response.strip()
            return "", True
        self.calls += 1
        found = CALL.search(response)
        if found is None:
            self.unreadable += 1
            return UNREADABLE, False
        first, operator, second = int(found[1]), found[2], int(found[3])
        result = {"+": first + second, "-": first - second, "*": first * second}[operator]
        return f"{result:0{self.digits}}", False

    def reward(self) -> float:
        return float(self.said.isdecimal() and self.said.isascii() and int(self.said) == int(self.answer))

    def metrics(self) -> dict[str, float]:
        """Return how often the calculator was called, and how many of the calls it could not read."""
        return {"calls": self.calls, "unreadable_calls": self.unreadable}


def products(path: str, *, digits: int = 2, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield products of numbers of `digits` digits: those of held-out pairs, in either order, if path is test."""
    numbers = range(10 ** (digits - 1), 10**digits)
    pairs = [(a, b) for a in numbers for b in numbers if a <= b]
    held_out = {*random.Random(seed).sample(pairs, round(HELD_OUT_FRACTION * len(pairs)))}  # noqa: S311 - not secret
    for a in numbers:
        for b in numbers:
            if ((min(a, b), max(a, b)) in held_out) == (path == "test"):
                result = f"{a * b:0{2 * digits}}"
                yield {"question": f"{a}*{b}?", "answer": result, "solution": f"{a}*{b}={result}"}

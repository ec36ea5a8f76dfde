"""What every source of questions yields: problems with an answer that can be checked."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Problem(NamedTuple):
    """One question: the whole prompt, the right answer, and a worked response that ends in it."""

    prompt: str
    answer: str
    worked: str


class Problems(Protocol):
    """A source of problems; every method is a pure function of its arguments and of the run's seed."""

    def train(self, step: int, count: int) -> list[Problem]:
        """The problems of a training step."""
        ...

    def held_out(self, count: int) -> list[Problem]:
        """The fixed problems of every evaluation; none of them occurs in training."""
        ...

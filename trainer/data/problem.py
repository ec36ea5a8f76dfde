"""What every source of questions yields: problems with an answer that can be checked."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Problem(NamedTuple):
    """One question, the right answer, and a worked response that ends in it."""

    question: str
    answer: str
    worked: str


class Question(NamedTuple):
    """A problem as the policy meets it. text: the prompt, to be read; tokens: the prompt; worked: tokens of a worked
    response, with the end."""

    text: str
    tokens: list[int]
    answer: str
    worked: list[int]


class ProblemSource(Protocol):
    """A source of problems; every method is a pure function of its arguments and of the run's seed."""

    def train(self, step: int, count: int) -> list[Problem]:
        """The problems of a training step."""
        ...

    def held_out(self, count: int | None) -> list[Problem]:
        """The fixed problems of every evaluation, none of which occurs in training; None: all there are."""
        ...

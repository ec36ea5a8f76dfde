"""Interface of question sources: problems with a checkable answer."""

from typing import NamedTuple, Protocol


class Problem(NamedTuple):
    """One question, its correct answer, and a worked response that ends in the answer."""

    question: str
    answer: str
    solution: str


class Question(NamedTuple):
    """A tokenized problem.

    text: the prompt as text; tokens: the prompt; worked: tokens of a worked response, including the end.
    """

    prompt: str
    prompt_tokens: list[int]
    answer: str
    solution_tokens: list[int]


class ProblemSource(Protocol):
    """Source of problems; every method is a pure function of its arguments and the run's seed."""

    def train(self, step: int, count: int) -> list[Problem]: ...

    def held_out(self, count: int | None) -> list[Problem]:
        """Return the fixed evaluation problems, none of which occurs in training; all of them if count is None."""
        ...

"""Interface of question sources: problems with a checkable answer."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol


class Problem(NamedTuple):
    """One question, its correct answer, and a worked response that ends in the answer.

    row: the columns that it was made from, for rewards that ask for them; messages: (role, text) of a conversation that
    is the prompt, in place of the question in the wording of `data.prompt`.
    """

    question: str
    answer: str
    solution: str
    row: Mapping[str, Any] | None = None
    messages: Sequence[tuple[str, str]] | None = None


class Question(NamedTuple):
    """A tokenized problem.

    prompt: as text; solution_tokens: a worked response, including the end; row: as in `Problem`.
    """

    prompt: str
    prompt_tokens: list[int]
    answer: str
    solution_tokens: list[int]
    row: Mapping[str, Any] | None = None


class Draw(NamedTuple):
    """Which training problems are wanted: those of a rollout, or of an update of the warm start.

    number: of the rollout or update, from 0; attempt: 0, or the round of resampling that replaces them.
    """

    phase: Literal["warm_start", "rollout"]
    number: int
    attempt: int = 0


class ProblemSource(Protocol):
    """Source of problems; every method is a pure function of its arguments and the run's seed."""

    def train(self, draw: Draw, count: int) -> list[Problem]: ...

    def validation(self, count: int) -> list[Problem]:
        """Return the fixed problems of evaluations during training, none of which occurs in training."""
        ...

    def test(self, count: int | None) -> list[Problem]:
        """Return the fixed problems of the tests before and after training; all of them if count is None."""
        ...

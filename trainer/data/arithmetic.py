"""Generated word problems of sums and differences; the worked response counts its way to the answer.

    Kim has figs: 7, gets 2.  ->  +2:07+1:08+0:09

Every fifth operand pair is held out: training never combines its two numbers, in any order, under any operator.
"""

import itertools
import random
from functools import cached_property

from conf.schema.training.prompts import ArithmeticData
from conf.schema.training.run_yaml import RunFileError
from trainer.data.problem import Draw, Problem

NAMES = ("Ann", "Bob", "Eve", "Ian", "Joe", "Kim", "Lea", "Max", "Sam", "Tom")
OBJECTS = ("pens", "nuts", "figs", "caps", "eggs", "toys")
VERBS = {"+": "gets", "-": "uses"}
HELD_OUT_FRACTION = 0.2
ROLLOUTS_FROM = 1_000_000_000
"""Rollouts have other problems than updates of the warm start with the same number."""


class ArithmeticProblems:
    """Problems of one seed, with operands up to those in `data`; see `data.problem.ProblemSource`."""

    def __init__(self, data: ArithmeticData, seed: int) -> None:
        self._first_operands = range(1, data.largest_first + 1)
        self._second_operands = range(1, data.largest_second + 1)
        self._seed = seed

    def train(self, draw: Draw, count: int) -> list[Problem]:
        step = draw.number if draw.phase == "warm_start" else (draw.attempt + 1) * ROLLOUTS_FROM + draw.number
        chance = random.Random(f"{self._seed} train {step}")  # noqa: S311 - nothing here is secret
        return [
            _problem(*chance.choice(self._train_problems), chance.choice(NAMES), chance.choice(OBJECTS))
            for _ in range(count)
        ]

    def validation(self, count: int) -> list[Problem]:
        """Return problems of `test`, some of which it may repeat."""
        return self.test(count)

    def test(self, count: int | None) -> list[Problem]:
        """Return distinct held-out problems. Raises RunFileError if there are too few."""
        every = [_problem(*sum_, n, t) for sum_ in self._held_out_problems for n in NAMES for t in OBJECTS]
        count = len(every) if count is None else count
        if count > len(every):
            raise RunFileError(f"loop.eval_prompts: only {len(every)} held-out prompts exist, not {count}")
        return random.Random(f"{self._seed} held out").sample(every, count)  # noqa: S311

    @cached_property
    def held_out_pairs(self) -> frozenset[tuple[int, int]]:
        """Return unordered pairs, the smaller number first."""
        pairs = sorted({(min(p), max(p)) for p in itertools.product(self._first_operands, self._second_operands)})
        return frozenset(random.Random(f"{self._seed} pairs").sample(pairs, round(HELD_OUT_FRACTION * len(pairs))))  # noqa: S311

    @cached_property
    def _train_problems(self) -> list[tuple[str, int, int]]:
        return [s for s in self._all_problems() if (min(s[1:]), max(s[1:])) not in self.held_out_pairs]

    @cached_property
    def _held_out_problems(self) -> list[tuple[str, int, int]]:
        return [s for s in self._all_problems() if (min(s[1:]), max(s[1:])) in self.held_out_pairs]

    def _all_problems(self) -> list[tuple[str, int, int]]:
        every = itertools.product(VERBS, self._first_operands, self._second_operands)
        return [(operator, x, y) for operator, x, y in every if operator == "+" or x >= y]


def _problem(operator: str, first: int, second: int, name: str, thing: str) -> Problem:
    sign = 1 if operator == "+" else -1
    steps = [f"{operator}{second - i}:{first + sign * i:02}" for i in range(second + 1)]
    question = f"{name} has {thing}: {first}, {VERBS[operator]} {second}. "
    return Problem(question, str(first + sign * second), "".join(steps))

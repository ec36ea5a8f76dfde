"""GSM8K (https://arxiv.org/abs/2110.14168): grade-school word problems, one JSON object {question, answer} per line.

The reference answer ends in `#### 18`; the worked response omits calculator annotations such as `<<6*3=18>>`.
"""

import json
import random
import re
from collections.abc import Callable

from etils import epath

from conf.schema.training.prompts import Gsm8kData
from conf.schema.training.run_yaml import RunFileError
from trainer.data.problem import Problem

CALCULATOR_ANNOTATION = re.compile(r"<<.*?>>")


class Gsm8kProblems:
    """Questions that fit into a prompt; see `data.problem.ProblemSource`. `num_too_long` counts the others."""

    def __init__(self, cfg: Gsm8kData, seed: int, fitting: Callable[[list[Problem]], list[Problem]]) -> None:
        """Read both files; `fitting` filters problems by the length of their prompts.

        Raises RunFileError if one is missing, a row is invalid, or no question fits.
        """
        self._seed = seed
        train, held_out = read_problems(cfg.path, "data.path"), read_problems(cfg.eval_path, "data.eval_path")
        self._train, self._held_out = fitting(train), fitting(held_out)
        self.num_too_long = len(train) + len(held_out) - len(self._train) - len(self._held_out)
        for kept, key in ((self._train, "data.path"), (self._held_out, "data.eval_path")):
            if not kept:
                raise RunFileError(f"loop.max_prompt_length: every question of {key} is longer")

    def train(self, step: int, count: int) -> list[Problem]:
        return random.Random(f"{self._seed} train {step}").choices(self._train, k=count)  # noqa: S311

    def held_out(self, count: int | None) -> list[Problem]:
        if count is None:
            return list(self._held_out)
        if count > len(self._held_out):
            raise RunFileError(f"loop.eval_prompts: data.eval_path has {len(self._held_out)} questions, not {count}")
        return random.Random("held out").sample(self._held_out, count)  # noqa: S311 - the same for every seed


def read_problems(path: str, key: str) -> list[Problem]:
    """Return every row of a file, local or gs://. Raises RunFileError naming the key, the file and the line."""
    file = epath.Path(path)
    if not file.exists():
        raise RunFileError(f"{key}: {path} does not exist")
    problems = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):  # splitting as text would also split at U+2028
        try:
            row = json.loads(line)
            problems.append(_problem(row["question"], row["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            raise RunFileError(f"{key}: {path}, line {number} is not a GSM8K row: {error!r}") from None
    return problems


def _problem(question: str, answer: str) -> Problem:
    worked, mark, gold = CALCULATOR_ANNOTATION.sub("", answer).rpartition("#### ")
    gold = gold.strip()
    if not isinstance(question, str):
        raise TypeError("the question is not text")
    if not mark or not gold:
        raise ValueError("the answer does not end in #### and a result")
    return Problem(question, gold, f"{worked}#### {gold}")

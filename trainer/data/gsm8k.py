"""Questions from rows: JSON lines, as those of GSM8K, or a function of the user's own.

GSM8K (https://arxiv.org/abs/2110.14168) has one JSON object {question, answer} per line. Its answer ends in `#### 18`,
which is the reference; the worked response omits calculator annotations such as `<<6*3=18>>`.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from conf.schema.training.prompts import CustomQuestions, Gsm8kData
from conf.schema.training.run_yaml import RunFileError
from trainer.data.problem import Problem
from trainer.extension import load_extension

CALCULATOR_ANNOTATION = re.compile(r"<<.*?>>")
ANSWER_MARK = "#### "
"""Before the answer in a worked response."""


class RowProblems:
    """Questions that fit into a prompt; see `data.problem.ProblemSource`. `num_too_long` counts the others."""

    def __init__(
        self, cfg: Gsm8kData | CustomQuestions, seed: int, fitting: Callable[[list[Problem]], list[Problem]]
    ) -> None:
        """Read all rows; `fitting` filters problems by the length of their prompts.

        Raises RunFileError if a file is missing, a row is invalid, or no question fits.
        """
        self._seed = seed
        train, held_out = _read(cfg, cfg.path, "data.path"), _read(cfg, cfg.eval_path, "data.eval_path")
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


def _read(cfg: Gsm8kData | CustomQuestions, path: str, key: str) -> list[Problem]:
    return called_problems(cfg, path, key) if isinstance(cfg, CustomQuestions) else read_problems(cfg, path, key)


def read_problems(cfg: Gsm8kData, path: str, key: str) -> list[Problem]:
    """Return every row of a file, local or gs://. Raises RunFileError naming the key, the file and the line."""
    file = epath.Path(path)
    if not file.exists():
        raise RunFileError(f"{key}: {path} does not exist")
    problems = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):  # splitting as text would also split at U+2028
        try:
            problems.append(_problem(cfg, json.loads(line)))
        except RowError as error:
            raise RunFileError(f"{error.key or key}: {path}, line {number} {error}") from None
        except ValueError as error:
            raise RunFileError(f"{key}: {path}, line {number} is not JSON: {error}") from None
    return problems


def called_problems(cfg: CustomQuestions, path: str, key: str) -> list[Problem]:
    """Return the rows of the user's function. Raises RunFileError naming the function and the row."""
    rows = load_extension("questions", cfg.source, "data.source", cfg.options)(path)
    problems = []
    for number, row in enumerate(rows):
        try:
            question, answer = (_text(row, name, "") for name in ("question", "answer"))
            solution = _text(row, "solution", "") if "solution" in row else f"{ANSWER_MARK}{answer}"
        except RowError as error:
            raise RunFileError(f"data.source: {cfg.source}, row {number} of {path} {error}") from None
        problems.append(Problem(question, answer, solution))
    if not problems:
        raise RunFileError(f"{key}: {cfg.source} has no question for {path}")
    return problems


class RowError(ValueError):
    """A row is not a question; `key` is the config key to change, empty if it is the file that is wrong."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def _problem(cfg: Gsm8kData, row: Any) -> Problem:
    question = _text(row, cfg.question_column, "data.question_column")
    answer = _text(row, cfg.answer_column, "data.answer_column")
    if cfg.answer_mark is not None:
        worked, mark, answer = CALCULATOR_ANNOTATION.sub("", answer).rpartition(cfg.answer_mark)
        solution = f"{worked}{ANSWER_MARK}{answer.strip()}"
        if not mark:
            problem = f"has no {cfg.answer_mark!r} in column {cfg.answer_column!r}; null takes the whole column"
            raise RowError(problem, "data.answer_mark")
    else:
        solution = f"{ANSWER_MARK}{answer.strip()}"
    if not answer.strip():
        raise RowError(f"has no answer in column {cfg.answer_column!r}")
    if cfg.solution_column is not None:
        solution = _text(row, cfg.solution_column, "data.solution_column")
    return Problem(question, answer.strip(), solution)


def _text(row: Any, column: str, key: str) -> str:
    """Return the text of a column; a number becomes text."""
    if not isinstance(row, Mapping):
        raise RowError(f"is not an object with columns, but {json.dumps(row, default=repr)[:80]}")
    if column not in row:
        raise RowError(f"has no column {column!r}; it has {', '.join(map(repr, row)) or 'none'}", key)
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"has no text in column {column!r}, but {json.dumps(value, default=repr)[:80]}", key)
    return str(value)

"""Questions from rows: JSON lines or Parquet, by default as those of GSM8K, or a function of the user's own.

GSM8K (https://arxiv.org/abs/2110.14168) has one JSON object {question, answer} per line. Its answer ends in `#### 18`,
which is the reference; the worked response omits calculator annotations such as `<<6*3=18>>`.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from conf.schema.training.prompts import CustomQuestions, Gsm8kData, RowData
from conf.schema.training.run_yaml import RunFileError
from trainer.corpus.source import HALF_SURROGATE, abbreviate, is_half_surrogate
from trainer.data.epochs import EpochOrder
from trainer.data.problem import Draw, Problem
from trainer.data.rows import Row, read_rows
from trainer.extension import load_extension

CALCULATOR_ANNOTATION = re.compile(r"<<.*?>>")
ANSWER_MARK = "#### "
"""Before the answer in a worked response."""
PHASES = ("rollout", "warm_start")
VALIDATION_SEED = 0
"""The same questions for every run.seed, so that seeds can be compared."""


class RowProblems:
    """Questions that fit into a prompt; see `data.problem.ProblemSource`.

    num_too_long: questions left out because they do not fit. bad_lines: why each row was skipped, in order.
    """

    def __init__(
        self, cfg: RowData, seed: int, num_validation: int, fitting: Callable[[list[Problem]], list[Problem]]
    ) -> None:
        """Read all rows.

        Args:
            cfg: section `data`.
            seed: of the order of training questions.
            num_validation: questions for evaluations during training, taken out of the training set if it has no other.
            fitting: filters problems by the length of their prompts.

        Raises:
            RunFileError: a file is missing, a row is invalid and not to be skipped, or no question fits.
        """
        self._cfg, self._seed, self._fitting = cfg, seed, fitting
        self.num_too_long, self.bad_lines = 0, list[str]()
        self._train, self._test = self._load(cfg.path, "data.path"), self._load(cfg.eval_path, "data.eval_path")
        if cfg.validation_path is None:
            self._train, self._validation = _split(self._train, num_validation)
        else:
            is_test = cfg.validation_path == cfg.eval_path
            held_out = self._test if is_test else self._load(cfg.validation_path, "data.validation_path")
            self._validation = _sample(held_out, num_validation, "loop.eval_prompts", "data.validation_path")
        self._orders: dict[tuple[str, int], EpochOrder] = {}

    def train(self, draw: Draw, count: int) -> list[Problem]:
        """Return problems without replacement in each epoch; see `EpochOrder`."""
        if (draw.phase, count) not in self._orders:
            seed = (self._seed, PHASES.index(draw.phase))
            self._orders[draw.phase, count] = EpochOrder(len(self._train), count, seed)
        order = self._orders[draw.phase, count]
        chosen = order.redraw(draw.number, draw.attempt) if draw.attempt else order.block(draw.number)
        return [self._train[i] for i in chosen]

    def validation(self, count: int) -> list[Problem]:
        return self._validation[:count]

    def test(self, count: int | None) -> list[Problem]:
        if count is None:
            return list(self._test)
        return _sample(self._test, count, "loop.test_prompts", "data.eval_path")

    def _load(self, path: str, key: str) -> list[Problem]:
        read = called_problems if isinstance(self._cfg, CustomQuestions) else read_problems
        assert isinstance(self._cfg, CustomQuestions | Gsm8kData)
        problems, bad = read(self._cfg, path, key)  # pyright: ignore[reportArgumentType]
        self.bad_lines += bad
        if not problems:
            raise RunFileError(f"{key}: no row of {path} can be used; the first: {bad[0]}")
        fitting = self._fitting(problems)
        self.num_too_long += len(problems) - len(fitting)
        if not fitting:
            raise RunFileError(f"loop.max_prompt_length: every question of {key} is longer")
        return fitting


def _split(problems: list[Problem], num_validation: int) -> tuple[list[Problem], list[Problem]]:
    """Return training and validation problems. Raises RunFileError if none is left to train on."""
    if num_validation >= len(problems):
        raise RunFileError(
            f"loop.eval_prompts: {num_validation} of the {len(problems)} questions of data.path cannot be left out of "
            "training; lower it, or set data.validation_path"
        )
    order = np.random.default_rng(VALIDATION_SEED).permutation(len(problems))
    chosen = [problems[i] for i in order[:num_validation]]
    left_out = frozenset(order[:num_validation].tolist())
    return [problem for i, problem in enumerate(problems) if i not in left_out], chosen


def _sample(problems: list[Problem], count: int, key: str, path_key: str) -> list[Problem]:
    """Return problems, the same for every seed. Raises RunFileError if there are too few."""
    if count > len(problems):
        raise RunFileError(f"{key}: {path_key} has {len(problems)} questions, not {count}")
    return random.Random("held out").sample(problems, count)  # noqa: S311


def read_problems(cfg: Gsm8kData, path: str, key: str) -> tuple[list[Problem], list[str]]:
    """Return the problems of all files, local or gs://, and why rows were skipped.

    Raises RunFileError naming the key, the file and the line of a row that is not to be skipped.
    """
    return _collect(cfg, read_rows(path, key), key, lambda row: _problem(cfg, row))


def called_problems(cfg: CustomQuestions, path: str, key: str) -> tuple[list[Problem], list[str]]:
    """Return the problems of the user's function, and why rows were skipped.

    Raises RunFileError naming the function and the row.
    """
    rows = load_extension("questions", cfg.source, "data.source", cfg.options)(path)
    named = (Row(f"{cfg.source}, row {number} of {path}", row) for number, row in enumerate(rows))
    problems, bad = _collect(cfg, named, "data.source", _own_problem)
    if not problems and not bad:
        raise RunFileError(f"{key}: {cfg.source} has no question for {path}")
    return problems, bad


class RowError(ValueError):
    """A row is not a question; `key` is the config key to change, empty if it is the file that is wrong."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def _collect(
    cfg: RowData, rows: Iterator[Row], key: str, parse: Callable[[Any], Problem]
) -> tuple[list[Problem], list[str]]:
    """Return the problems of rows, and why rows were skipped, if `data.on_bad_line` allows that."""
    problems, bad = list[Problem](), list[str]()
    for row in rows:
        try:
            if row.problem:
                raise RowError(row.problem)
            problems.append(parse(row.value))
        except RowError as error:
            message = f"{row.location} {error}"
            if cfg.on_bad_line == "error":
                raise RunFileError(f"{error.key or key}: {message}") from None
            bad.append(message)
    return problems, bad


def _own_problem(row: Any) -> Problem:
    question, answer = (_text(row, name, "data.source") for name in ("question", "answer"))
    solution = _text(row, "solution", "data.source") if "solution" in row else f"{ANSWER_MARK}{answer}"
    return Problem(question, answer, solution, row)


def _problem(cfg: Gsm8kData, row: Any) -> Problem:
    if cfg.question_template is None:
        question = _text(row, cfg.question_column or "", "data.question_column")
    else:
        key = "data.question_template"
        question = cfg.question_template.format_map({name: _text(row, name, key) for name in cfg.question_columns})
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
    return Problem(question, answer.strip(), solution, row)


def _text(row: Any, column: str, key: str) -> str:
    """Return the text of a column; a number becomes text."""
    if not isinstance(row, Mapping):
        raise RowError(f"is not an object with columns, but {abbreviate(row)}")
    if column not in row:
        raise RowError(f"has no column {column!r}; it has {', '.join(map(repr, row)) or 'none'}", key)
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"has no text in column {column!r}, but {abbreviate(value)}", key)
    if is_half_surrogate(text := str(value)):
        raise RowError(f"{HALF_SURROGATE}, in column {column!r}")
    return text

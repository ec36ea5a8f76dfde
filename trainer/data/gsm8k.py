"""Questions from rows: JSON lines or Parquet, by default as those of GSM8K, or a function of the user's own.

GSM8K (https://arxiv.org/abs/2110.14168) has one JSON object {question, answer} per line. Its answer ends in `#### 18`,
which is the reference; the worked response omits calculator annotations such as `<<6*3=18>>`.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from conf.formats import RunFileError
from conf.json_lines import HALF_SURROGATE, abbreviate, is_half_surrogate
from conf.schema.training.data import ANSWER_MARK, CustomQuestions, Gsm8kData, RowData
from conf.schema.training.loop import REJECTED, GrpoLoop
from trainer.corpus.rows import Row, read_rows
from trainer.data.prompting import Draw, Problem, PromptEncoder, Question
from trainer.extension import load_extension

FIRST_DRAW, REDRAW = 0, 1


class EpochOrder:
    """Blocks of `count` question numbers below `size`.

    The order is a new permutation in each epoch, as a function of (seed, number of the rollout). Nothing of it is
    saved: a resumed run, on any number of workers, continues where the number of the rollout says. A rollout that
    crosses the end of an epoch asks no question twice, if there are enough: those that the old epoch ends with are
    moved behind it in the new one. TRL, Tunix and Simply walk permutations too; TRL leaves out the rest of an epoch.
    """

    def __init__(self, size: int, count: int, seed: tuple[int, ...]) -> None:
        self._size, self._count, self._seed = size, count, seed
        self._latest: tuple[int, np.ndarray] | None = None  # an epoch and its order

    def block(self, number: int) -> np.ndarray:
        """Return the questions of block `number`, int [count]."""
        epoch, at = divmod(number * self._count, self._size)
        found = self._order(epoch)[at : at + self._count]
        while len(found) < self._count:
            epoch += 1
            found = np.concatenate([found, self._order(epoch)[: self._count - len(found)]])
        return found

    def redraw(self, number: int, attempt: int) -> np.ndarray:
        """Return other questions in place of block `number`, int [count].

        They are chosen among all questions, whether or not the epoch has asked them. attempt: from 1; each has
        questions of its own.
        """
        draw = np.random.default_rng((*self._seed, REDRAW, number))
        unasked = draw.permutation(np.setdiff1d(np.arange(self._size), self.block(number)))
        while len(unasked) < attempt * self._count:  # too few to ask each only once
            unasked = np.concatenate([unasked, draw.permutation(self._size)])
        return unasked[(attempt - 1) * self._count : attempt * self._count]

    def _order(self, epoch: int) -> np.ndarray:
        """Return the permutation of an epoch, which depends on the one before where a block crosses its beginning."""
        if self._size % self._count == 0 or self._size < self._count:
            return self._permutation(epoch)
        if self._latest is None or self._latest[0] > epoch:
            self._latest = 0, self._permutation(0)
        while self._latest[0] < epoch:
            before, order = self._latest
            asked = (before + 1) * self._size % self._count  # of the block that crosses, in the epoch before
            tail = order[self._size - asked :]
            self._latest = before + 1, _move_back(self._permutation(before + 1), tail, self._count - asked)
        return self._latest[1]

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((*self._seed, FIRST_DRAW, epoch)).permutation(self._size)


def _move_back(order: np.ndarray, asked: np.ndarray, first: int) -> np.ndarray:
    """Exchange questions among the `first` of an order that were just asked for others behind them."""
    was_asked = np.isin(order, asked)
    here = np.flatnonzero(was_asked[:first])
    there = first + np.flatnonzero(~was_asked[first:])[: len(here)]
    order[here], order[there] = order[there], order[here]
    return order


PHASES = ("rollout", "warm_start")
VALIDATION_SEED = 0
"""The same questions for every run.seed, so that seeds can be compared."""


class _Measured(NamedTuple):
    """A problem with the tokens of its prompt, and of its longest worked response with the end."""

    problem: Problem
    prompt_tokens: int
    num_tokens: int


class RowProblems:
    """Questions that fit into a prompt; see `data.prompting.ProblemSource`.

    num_too_long: questions left out because they do not fit; num_overlong_solutions: those that are no part of
    supervised updates, because their worked responses do not fit. bad_lines: why each row was skipped, in order.
    """

    def __init__(self, cfg: RowData, loop: GrpoLoop, seed: int, encoder: PromptEncoder) -> None:
        """Read all rows.

        Args:
            cfg: section `data`.
            loop: says what is trained on, how long prompts and worked responses may be, and how many questions are for
                evaluations during training: taken out of the training set if it has no other.
            seed: of the order of training questions.
            encoder: measures prompts and worked responses.

        Raises:
            RunFileError: a file is missing, a row is invalid and not to be skipped, or no question fits.
        """
        self._cfg, self._loop, self._seed, self._encoder = cfg, loop, seed, encoder
        self.num_too_long, self.bad_lines, num_validation = 0, list[str](), loop.eval_prompts
        train = self._load(cfg.path, "data.path", has_pairs=loop.loss_type == "dpo")
        self._test = _problems(self._load(cfg.eval_path, "data.eval_path"))
        if cfg.validation_path is None:
            train, self._validation = _split(train, num_validation)
        else:
            is_test = cfg.validation_path == cfg.eval_path
            held_out = self._test if is_test else _problems(self._load(cfg.validation_path, "data.validation_path"))
            self._validation = _sample(held_out, num_validation, "loop.eval_prompts", "data.validation_path")
        self._train = self._worked = _problems(train)
        if loop.solution_phases:
            fitting = fitting_solutions(loop, [row.num_tokens for row in train], lambda i: train[i].problem.place)
            self._worked = [train[i].problem for i in fitting]
        self.num_overlong_solutions = len(self._train) - len(self._worked)
        self._orders: dict[tuple[str, int], EpochOrder] = {}

    def train(self, draw: Draw, count: int) -> list[Problem]:
        """Return problems without replacement in each epoch; see `EpochOrder`."""
        problems = self._worked if draw.phase in self._loop.solution_phases else self._train
        if (draw.phase, count) not in self._orders:
            seed = (self._seed, PHASES.index(draw.phase))
            self._orders[draw.phase, count] = EpochOrder(len(problems), count, seed)
        order = self._orders[draw.phase, count]
        chosen = order.redraw(draw.number, draw.attempt) if draw.attempt else order.block(draw.number)
        return [problems[i] for i in chosen]

    def validation(self, count: int) -> list[Problem]:
        return self._validation[:count]

    def test(self, count: int | None) -> list[Problem]:
        if count is None:
            return list(self._test)
        return _sample(self._test, count, "loop.test_prompts", "data.eval_path")

    def _load(self, path: str, key: str, *, has_pairs: bool = False) -> list[_Measured]:
        """Return the problems whose prompts fit. has_pairs: each has a `rejected` response, too, which differs."""
        read = called_problems if isinstance(self._cfg, CustomQuestions) else read_problems
        assert isinstance(self._cfg, CustomQuestions | Gsm8kData)
        problems, bad = read(self._cfg, path, key, has_pairs)  # pyright: ignore[reportArgumentType]
        measured = self._measure(problems, bad, key, has_pairs=has_pairs)
        self.bad_lines += bad
        if not measured:
            told = f"no row of {path} can be used; the first: {bad[0]}" if bad else f"{path} has no rows"
            raise RunFileError(f"{key}: {told}")
        fitting = [row for row in measured if row.prompt_tokens <= self._loop.max_prompt_length]
        self.num_too_long += len(measured) - len(fitting)
        if not fitting:
            raise RunFileError(f"loop.max_prompt_length: every question of {key} is longer")
        return fitting

    def _measure(self, problems: list[Problem], bad: list[str], key: str, *, has_pairs: bool) -> list[_Measured]:
        """Return problems with their lengths; what is no pair is a bad row."""
        questions, measured = self._encoder.encode(problems), list[_Measured]()
        others = encode_rejected(self._encoder, [problem.row for problem in problems]) if has_pairs else questions
        for problem, question, other in zip(problems, questions, others, strict=True):
            if has_pairs and other.solution_tokens == question.solution_tokens:
                message = f"{problem.place} is no pair: its solution and its {REJECTED!r} are the same"
                _refuse_or_skip(self._cfg, message, key, bad)
            else:
                longest = max(len(question.solution_tokens), len(other.solution_tokens))
                measured.append(_Measured(problem, len(question.prompt_tokens), longest))
        return measured


def _problems(measured: list[_Measured]) -> list[Problem]:
    return [row.problem for row in measured]


def fitting_solutions(loop: GrpoLoop, lengths: Sequence[int], place: Callable[[int], str]) -> list[int]:
    """Return the numbers of the worked responses that fit into `loop.max_new_tokens`.

    lengths: in tokens, with the end; place: names one of them. Raises RunFileError if one does not fit, and
    `loop.filter_overlong_solutions` does not leave it out, or if none is left.
    """
    most = loop.max_new_tokens
    fitting = [number for number, length in enumerate(lengths) if length <= most]
    if len(fitting) < len(lengths) and not (fitting and loop.filter_overlong_solutions):
        first = next(number for number, length in enumerate(lengths) if length > most)
        told = f"{len(lengths) - len(fitting):,} of {len(lengths):,} worked responses have more than {most:,} tokens"
        told += f"; the first, {place(first)}, has {lengths[first]:,}, the longest {max(lengths):,}; raise it"
        told += ", or leave them out with loop.filter_overlong_solutions=true" if fitting else ""
        raise RunFileError(f"loop.max_new_tokens: {told}")
    return fitting


def _split(problems: list[_Measured], num_validation: int) -> tuple[list[_Measured], list[Problem]]:
    """Return training and validation problems. Raises RunFileError if none is left to train on."""
    if num_validation >= len(problems):
        raise RunFileError(
            f"loop.eval_prompts: {num_validation} of the {len(problems)} questions of data.path cannot be left out of "
            "training; lower it, or set data.validation_path"
        )
    order = np.random.default_rng(VALIDATION_SEED).permutation(len(problems))
    chosen = [problems[i].problem for i in order[:num_validation]]
    left_out = frozenset(order[:num_validation].tolist())
    return [problem for i, problem in enumerate(problems) if i not in left_out], chosen


def _sample(problems: list[Problem], count: int, key: str, path_key: str) -> list[Problem]:
    """Return problems, the same for every seed. Raises RunFileError if there are too few."""
    if count > len(problems):
        raise RunFileError(f"{key}: {path_key} has {len(problems)} questions, not {count}")
    return random.Random("held out").sample(problems, count)  # noqa: S311


def read_problems(cfg: Gsm8kData, path: str, key: str, has_pairs: bool = False) -> tuple[list[Problem], list[str]]:
    """Return the problems of all files, local or gs://, and why rows were skipped.

    has_pairs: each row needs a rejected response, too. Raises RunFileError naming the key, the file and the line of a
    row that is not to be skipped.
    """
    return _collect(cfg, read_rows(path, key), key, lambda row: _problem(cfg, row), has_pairs)


def called_problems(
    cfg: CustomQuestions, path: str, key: str, has_pairs: bool = False
) -> tuple[list[Problem], list[str]]:
    """Return the problems of the user's function, and why rows were skipped.

    has_pairs: as of `read_problems`. Raises RunFileError naming the function and the row.
    """
    rows = load_extension("questions", cfg.source, "data.source", cfg.options)(path)
    if not isinstance(rows, Iterable):
        raise RunFileError(f"data.source: {cfg.source} must return rows, not {rows!r:.80}")
    named = (Row(f"{cfg.source}, row {number} of {path}", row) for number, row in enumerate(rows))
    problems, bad = _collect(cfg, named, "data.source", _own_problem, has_pairs)
    if not problems and not bad:
        raise RunFileError(f"{key}: {cfg.source} has no question for {path}")
    return problems, bad


class RowError(ValueError):
    """A row is not a question; `key` is the config key to change, empty if it is the file that is wrong."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def _collect(
    cfg: RowData, rows: Iterator[Row], key: str, parse: Callable[[Any], Problem], has_pairs: bool
) -> tuple[list[Problem], list[str]]:
    """Return the problems of rows, and why rows were skipped, if `data.on_bad_line` allows that."""
    problems, bad = list[Problem](), list[str]()
    for row in rows:
        try:
            if row.problem:
                raise RowError(row.problem)
            problem = parse(row.value)._replace(place=row.location)
            if has_pairs:
                _rejected_response(problem.row)
            problems.append(problem)
        except RowError as error:
            _refuse_or_skip(cfg, f"{row.location} {error}", error.key or key, bad)
    return problems, bad


def _refuse_or_skip(cfg: RowData, message: str, key: str, bad: list[str]) -> None:
    """Note a bad row in `bad`. Raises RunFileError if `data.on_bad_line` does not skip it."""
    if cfg.on_bad_line == "error":
        raise RunFileError(f"{key}: {message}")
    bad.append(message)


def encode_rejected(encoder: PromptEncoder, rows: Sequence[Mapping[str, Any] | None]) -> list[Question]:
    """Return the responses that the rows' solutions are preferred to, each as the worked one of an empty question."""
    return encoder.encode([Problem("", "", _rejected_response(row)) for row in rows])


def _rejected_response(row: Mapping[str, Any] | None) -> str:
    """Return the response that a row's solution is preferred to. Raises RowError if it has none."""
    return _text(row or {}, REJECTED, "loop.loss_type")


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
    solution, answer = cfg.split_answer(answer)
    if not solution:
        problem = f"has no {cfg.answer_mark!r} in column {cfg.answer_column!r}; null takes the whole column"
        raise RowError(problem, "data.answer_mark")
    if not answer:
        raise RowError(f"has no answer in column {cfg.answer_column!r}")
    if cfg.solution_column is not None:
        solution = _text(row, cfg.solution_column, "data.solution_column")
        if not solution.strip():
            raise RowError(f"has no solution in column {cfg.solution_column!r}")
    return Problem(question, answer, solution, row)


def _text(row: Any, column: str, key: str) -> str:
    """Return the text of a column; a number becomes text, and a missing value is none."""
    if not isinstance(row, Mapping):
        raise RowError(f"is not an object with columns, but {abbreviate(row)}")
    if column not in row:
        raise RowError(f"has no column {column!r}; it has {', '.join(map(repr, row)) or 'none'}", key)
    value = row[column]
    is_text = isinstance(value, str | int | float) and not isinstance(value, bool)
    if not is_text or (isinstance(value, float) and not math.isfinite(value)):
        raise RowError(f"has no text in column {column!r}, but {abbreviate(value)}", key)
    if is_half_surrogate(text := str(value)):
        raise RowError(f"{HALF_SURROGATE}, in column {column!r}")
    return text

"""Questions from rows: JSON lines or Parquet, by default as those of GSM8K, or a function of the user's own.

GSM8K (https://arxiv.org/abs/2110.14168) has one JSON object {question, answer} per line. Its answer ends in `#### 18`,
which is the reference; the worked response omits calculator annotations such as `<<6*3=18>>`.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from conf.schema.training.data import CustomQuestions, Gsm8kData, RowData
from conf.schema.training.run_yaml import RunFileError
from trainer.corpus import files
from trainer.corpus.source import HALF_SURROGATE, LineError, abbreviate, first_line, is_half_surrogate, parse_json
from trainer.data.prompting import Draw, Problem
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


PARQUET = ".parquet"
MAX_ROW_BYTES = 2**26
"""Bytes of a line of JSON."""
MAX_FILE_BYTES = 2**32
"""Bytes of the rows of a Parquet file, as they are in memory; a dictionary makes them of a few kilobytes."""
ROWS_AT_ONCE = 256


class Row(NamedTuple):
    """A row and its location, for messages. problem: why it cannot be read; then `value` is None."""

    location: str
    value: Any
    problem: str = ""


def read_rows(pattern: str, key: str) -> Iterator[Row]:
    """Yield the rows of all files of a path or glob. Raises RunFileError naming the key if a file cannot be read."""
    for file in files.expand_glob(pattern, key):
        with files.open_file(file) as stream:
            yield from _parquet_rows(stream, file, key) if file.endswith(PARQUET) else _json_rows(stream, file, key)


def _json_rows(stream: IO[bytes], file: str, key: str) -> Iterator[Row]:
    # of bytes, since splitting as text would also split at U+2028
    for number, line in enumerate(iter(lambda: stream.readline(MAX_ROW_BYTES + 1), b""), 1):
        place = f"{file}, line {number}"
        if len(line) > MAX_ROW_BYTES:
            raise RunFileError(f"{key}: {place} has more than {MAX_ROW_BYTES:,} bytes")
        if not line.strip():
            continue
        try:
            yield Row(place, parse_json(line))
        except LineError as error:
            yield Row(place, None, str(error))
        except UnicodeDecodeError as error:
            yield Row(place, None, f"is not UTF-8 ({error.reason} at byte {error.start} of the line)")


def _parquet_rows(stream: IO[bytes], file: str, key: str) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    number = 0
    try:
        opened, size = parquet.ParquetFile(stream), 0
        for batch in opened.iter_batches(ROWS_AT_ONCE):
            size += sum(_decoded_bytes(column) for column in batch.columns)
            if size > MAX_FILE_BYTES:
                raise RunFileError(f"{key}: {file} has more than {MAX_FILE_BYTES:,} bytes of rows; use fewer")
            for index in range(batch.num_rows):
                number += 1
                place = f"{file}, row {number}"
                try:
                    yield Row(place, batch.slice(index, 1).to_pylist()[0])
                except UnicodeDecodeError as error:  # Parquet's readers do not check the encoding
                    yield Row(place, None, f"is not UTF-8: {error.reason}")
    except RunFileError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RunFileError(f"{key}: {file} is not a readable Parquet file: {first_line(error)}") from None


def _decoded_bytes(column: Any) -> int:
    """Return the bytes of a column of a batch without its dictionary, if it has one."""
    return (column.dictionary_decode() if hasattr(column, "dictionary_decode") else column).nbytes


CALCULATOR_ANNOTATION = re.compile(r"<<.*?>>")
ANSWER_MARK = "#### "
"""Before the answer in a worked response."""
PHASES = ("rollout", "warm_start")
VALIDATION_SEED = 0
"""The same questions for every run.seed, so that seeds can be compared."""


class RowProblems:
    """Questions that fit into a prompt; see `data.prompting.ProblemSource`.

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

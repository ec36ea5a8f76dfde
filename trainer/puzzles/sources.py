"""Puzzles of others: CSV files and the arrays of the study's data set builders. Every puzzle that is used is checked.

https://github.com/SamsungSAILMontreal/TinyRecursiveModels (folder dataset/) reads the one and writes the other. A CSV
file has columns question, answer and maybe rating, with one character per cell.
"""

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from random import Random
from typing import NamedTuple

import numpy as np
from etils import epath

from conf.formats import RunFileError
from trainer.corpus import files
from trainer.puzzles import maze, sudoku

HUB = "hf://"


@dataclass(frozen=True)
class Kind:
    """What differs between sudoku and mazes. Boards are codes, uint8 [count, cells]; a token is a code + 1."""

    name: str
    characters: Callable[[int], str]
    """Characters of a board of this side, in the order of their codes."""
    sides: Callable[[int], bool]
    first_problem: Callable[[np.ndarray, np.ndarray], tuple[int, str] | None]
    signatures: Callable[[np.ndarray], np.ndarray]


SUDOKU = Kind(
    "sudoku", lambda side: "0123456789"[: side + 1], {4, 9}.__contains__, sudoku.first_problem, sudoku.signatures
)
MAZE = Kind("maze", lambda _: maze.CHARACTERS, lambda side: side > 1, maze.first_problem, maze.signatures)


class Puzzles(NamedTuple):
    """Boards [count, cells]; difficulty per group (-1: unknown); where each group (a puzzle and its images) begins."""

    questions: np.ndarray
    answers: np.ndarray
    ratings: np.ndarray
    groups: np.ndarray


class Row(NamedTuple):
    line: int
    question: str
    answer: str
    rating: int


def split_file(source: str, split: str) -> str:
    """Return where a split's CSV file is: in a folder, or in a data set of the Hugging Face Hub, downloaded once."""
    if not source.startswith(HUB):
        return f"{source.rstrip('/')}/{split}.csv"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return hf_hub_download(source.removeprefix(HUB).strip("/"), f"{split}.csv", repo_type="dataset")
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise RunFileError(f"--source: cannot download {split}.csv of {source}: {str(error).splitlines()[0]}") from None


def read_csv(file: str, kind: Kind, limit: int | None, seed: int, min_rating: int | None = None) -> Puzzles:
    """Read a CSV file, or `limit` of its rows, chosen by the seed: a larger limit keeps those of a smaller one.

    Raises:
        RunFileError: with file and line.
    """
    random = Random(seed)  # noqa: S311  (no secret)
    needs_rating = kind is SUDOKU or min_rating is not None  # what the ratings of mazes are, nobody documents
    rows_of_file = _rows(file, needs_rating)
    keyed = ((random.random(), row) for row in rows_of_file if min_rating is None or row.rating >= min_rating)
    rows = [row for _, row in (keyed if limit is None else nsmallest(limit, keyed, key=lambda pair: pair[0]))]
    rows.sort()
    if len(rows) < (limit or 1):
        raise RunFileError(f"{file}: {len(rows)} puzzles, but {limit or 'at least 1'} wanted")
    boards = [_boards(file, kind, rows, column) for column in ("question", "answer")]
    if found := kind.first_problem(boards[0], boards[1]):
        raise RunFileError(f"{file}:{rows[found[0]].line}: {found[1]}")
    return Puzzles(boards[0], boards[1], np.array([row.rating for row in rows], np.int32), np.arange(len(rows) + 1))


def _rows(file: str, needs_rating: bool) -> Iterator[Row]:
    try:
        with files.open_file(file) as raw:
            files.refuse_packed(raw, file, "--source")
            reader = csv.reader(io.TextIOWrapper(raw, encoding="utf-8-sig", newline=""))
            header = next(reader, [])
            if missing := [name for name in ("question", "answer") if name not in header]:
                raise RunFileError(f"{file}:1: no column {missing[0]!r} in the header {','.join(header)!r:.80}")
            question, answer = header.index("question"), header.index("answer")
            rating = header.index("rating") if "rating" in header else None
            for row in filter(None, reader):  # a blank line is none
                if len(row) != len(header):
                    raise RunFileError(f"{file}:{reader.line_num}: {len(row)} columns, but {len(header)} in the header")
                rated = "" if rating is None else row[rating]
                if needs_rating and rating is not None and not rated.isdecimal():
                    raise RunFileError(f"{file}:{reader.line_num}: rating {rated!r:.20} is no number")
                yield Row(reader.line_num, row[question], row[answer], int(rated) if rated.isdecimal() else -1)
    except FileNotFoundError:
        raise RunFileError(f"{file} does not exist") from None
    except IsADirectoryError:
        raise RunFileError(f"{file} is a folder") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise RunFileError(f"{file} is no CSV file in UTF-8: {error}") from None


def _boards(file: str, kind: Kind, rows: list[Row], column: str) -> np.ndarray:
    cells = len(rows[0].question)
    side = round(cells**0.5)
    if side * side != cells or not kind.sides(side):
        raise RunFileError(f"{file}:{rows[0].line}: question has {cells} characters, which no {kind.name} has")
    texts = [getattr(row, column) for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if len(text) != cells:
            raise RunFileError(f"{file}:{row.line}: {column} has {len(text)} characters, not {cells}")
    known = kind.characters(side)
    codes = np.full(256, 255, np.uint8)
    codes[list(known.encode())] = np.arange(len(known))
    if kind.name == "sudoku":
        codes[ord(".")] = 0
    raw = "".join(texts).encode("latin-1", errors="replace")
    boards = codes[np.frombuffer(raw, np.uint8)].reshape(len(rows), cells)
    if len(wrong := np.argwhere(boards == 255)):
        row, at = wrong[0].tolist()
        message = f"{column} has {texts[row][at]!r} at character {at + 1}; known are {known!r}"
        raise RunFileError(f"{file}:{rows[row].line}: {message}")
    return boards


def is_arrays(source: str) -> bool:
    """Return whether a folder has the layout of the study's builders."""
    return not source.startswith(HUB) and (epath.Path(source) / "train" / "dataset.json").exists()


def read_arrays(source: str, split: str, kind: Kind) -> Puzzles:
    """Read a split of a folder of the study's builders: all__inputs.npy and so on. Raises RunFileError."""
    folder = epath.Path(source) / split
    arrays = {}
    for name in ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices"):
        file = folder / f"all__{name}.npy"
        try:
            with files.open_file(file) as stream:
                arrays[name] = np.load(stream)
        except (OSError, ValueError, EOFError) as error:
            raise RunFileError(f"{file} cannot be read: {error}") from None
    inputs, labels, groups = arrays["inputs"], arrays["labels"], arrays["group_indices"].astype(np.int64)
    count = len(inputs)
    counted = np.array_equal(arrays["puzzle_indices"], range(count + 1))
    if inputs.shape != labels.shape or inputs.ndim != 2 or not counted:
        raise RunFileError(
            f"{folder}: all__inputs.npy, all__labels.npy and all__puzzle_indices.npy do not belong together"
        )
    if arrays["puzzle_identifiers"].any() or groups[0] != 0 or groups[-1] != count or (np.diff(groups) < 1).any():
        raise RunFileError(
            f"{folder}: all__group_indices.npy or all__puzzle_identifiers.npy is not that of a {kind.name}"
        )
    side = round(inputs.shape[1] ** 0.5)
    if side * side != inputs.shape[1] or not kind.sides(side):
        raise RunFileError(f"{folder}/all__inputs.npy has {inputs.shape[1]} cells, which no {kind.name} has")
    for name, array in (("inputs", inputs), ("labels", labels)):
        wrong = ((array < 1) | (array > len(kind.characters(side)))).any(1)
        if wrong.any():
            message = f"row {wrong.argmax()} has a token outside 1 to {len(kind.characters(side))}"
            raise RunFileError(f"{folder}/all__{name}.npy: {message}")
    questions, answers = ((array - 1).astype(np.uint8) for array in (inputs, labels))
    if found := kind.first_problem(questions, answers):
        raise RunFileError(f"{folder}/all__labels.npy: row {found[0]}: {found[1]}")
    return Puzzles(questions, answers, np.full(len(groups) - 1, -1, np.int32), groups)

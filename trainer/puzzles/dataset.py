"""Puzzles on disk, as `python -m trainer.puzzles` writes them, and their batches.

`puzzles.json` describes the folder. Each split has `inputs.npy` and `labels.npy` (uint8, [examples, cells]),
`groups.npy` (int64: the members of base puzzle g are the rows groups[g] to groups[g + 1]) and `ratings.npy` (int32 per
group, or -1).
Token 0 is padding, in labels a cell that does not count.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from conf.formats import RunFileError, format_problem
from conf.strict_json import dumps
from trainer.corpus import files

SPLITS = ("train", "test")
COUNTS = ("groups", "examples")
DTYPES = {"inputs": np.uint8, "labels": np.uint8, "groups": np.int64, "ratings": np.int32}
REBUILD = "build the folder again with `python -m trainer.puzzles`"

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Inputs and labels, int32 [batch, cells], and puzzle identifiers, int32 [batch]."""


class EvalBatch(NamedTuple):
    """Puzzles in order. Rows from `size` on are padding, 0."""

    inputs: np.ndarray
    labels: np.ndarray
    ids: np.ndarray
    ratings: np.ndarray
    size: int


@dataclass(frozen=True)
class Split:
    """Arrays of a split, as described at the top of the module."""

    inputs: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    ratings: np.ndarray

    def counts(self) -> dict[str, int]:
        return {"groups": len(self.groups) - 1, "examples": len(self.inputs)}


class PuzzleDataset:
    """A folder of puzzles, local or in a bucket. A split is read when it is first used."""

    def __init__(self, path: str, facts: dict[str, Any]) -> None:
        self.path = path
        self.kind: str = facts["kind"]
        self.height: int = facts["height"]
        self.width: int = facts["width"]
        self.vocabulary: int = facts["vocabulary"]
        self.identifiers: int = facts["identifiers"]
        self.splits: dict[str, dict[str, int]] = {
            name: {k: facts["splits"][name][k] for k in COUNTS} for name in SPLITS
        }
        self.cells = self.height * self.width

    @classmethod
    def open(cls, path: str, key: str = "data.path") -> "PuzzleDataset":
        """Read `puzzles.json`. Raises RunFileError that starts with the config key."""
        file = epath.Path(path) / "puzzles.json"
        try:
            facts = json.loads(file.read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise RunFileError(f"{key}: no {file}; make the folder with `python -m trainer.puzzles`") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RunFileError(f"{key}: {file} is not JSON: {error}; {REBUILD}") from None
        if not isinstance(facts, dict):
            raise RunFileError(f"{key}: {file} is not an object; {REBUILD}")
        if problem := format_problem(facts, str(file)):
            raise RunFileError(f"{key}: {problem}")
        try:
            return cls(path, facts)
        except (KeyError, TypeError) as error:
            raise RunFileError(f"{key}: {file} lacks or misstates {error}; {REBUILD}") from None

    @cached_property
    def train(self) -> Split:
        return self._read("train")

    @cached_property
    def test(self) -> Split:
        return self._read("test")

    def train_batch(self, seed: int, iteration: int, batch_size: int) -> Batch:
        """Return the global batch of an iteration, counted from 0.

        An epoch has one random member of each group, in random order; a batch may end one epoch and begin the next.
        """
        groups, rows = self.train.groups, []
        count = len(groups) - 1
        position, stop = iteration * batch_size, (iteration + 1) * batch_size
        while position < stop:
            epoch, start = divmod(position, count)
            rows.append(self._epoch(seed, epoch)[start : start + stop - position])
            position += len(rows[-1])
        return self._take(self.train, np.concatenate(rows))

    @cached_property
    def _epoch(self) -> Callable[[int, int], np.ndarray]:
        return lru_cache(maxsize=2)(partial(epoch_rows, self.train.groups))

    def test_batches(self, batch_size: int, limit: int | None = None) -> Iterator[EvalBatch]:
        """Yield the first `limit` test puzzles."""
        test = self.test
        of_row = np.repeat(test.ratings, np.diff(test.groups))
        return self._in_batches(test, np.arange(len(test.inputs))[:limit], of_row[:limit], batch_size)

    def original_batches(self, batch_size: int, limit: int) -> Iterator[EvalBatch]:
        """Yield the first `limit` training puzzles, without their images."""
        train = self.train
        return self._in_batches(train, train.groups[:-1][:limit], train.ratings[:limit], batch_size)

    def _in_batches(self, split: Split, rows: np.ndarray, ratings: np.ndarray, batch_size: int) -> Iterator[EvalBatch]:
        for start in range(0, len(rows), batch_size):
            taken = [*self._take(split, rows[start : start + batch_size]), ratings[start : start + batch_size]]
            size = len(taken[0])
            inputs, labels, ids, rated = (np.pad(a, [(0, batch_size - size), (0, 0)][: a.ndim]) for a in taken)
            yield EvalBatch(inputs, labels, ids, rated, size)

    def _take(self, split: Split, rows: np.ndarray) -> Batch:
        return split.inputs[rows].astype(np.int32), split.labels[rows].astype(np.int32), np.zeros(len(rows), np.int32)

    def _read(self, split: str) -> Split:
        read = Split(**{name: self._array(split, name) for name in DTYPES})
        shape, ends = (self.splits[split]["examples"], self.cells), read.groups[[0, -1]].tolist()
        if read.inputs.shape != shape or read.labels.shape != shape or ends != [0, shape[0]] or not shape[0]:
            raise RunFileError(f"data.path: the files of {self.path}/{split} do not belong together; {REBUILD}")
        if (np.diff(read.groups) < 1).any() or len(read.ratings) != len(read.groups) - 1:
            raise RunFileError(f"data.path: {self.path}/{split}/groups.npy has an empty group; {REBUILD}")
        if (highest := int(max(read.inputs.max(), read.labels.max()))) >= self.vocabulary:
            message = f"has token {highest}, but puzzles.json a vocabulary of {self.vocabulary}"
            raise RunFileError(f"data.path: {self.path}/{split} {message}; {REBUILD}")
        return read

    def _array(self, split: str, name: str) -> np.ndarray:
        file = epath.Path(self.path) / split / f"{name}.npy"
        try:
            with files.open_file(file) as stream:
                array = np.load(stream)
        except (OSError, ValueError, EOFError) as error:
            raise RunFileError(f"data.path: {file} cannot be read: {error}; {REBUILD}") from None
        if array.dtype != DTYPES[name] or array.ndim != 1 + (name in ("inputs", "labels")):
            raise RunFileError(f"data.path: {file} is {array.dtype} with {array.ndim} axes; {REBUILD}")
        return array


def epoch_rows(groups: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return one random row of each group in random order. Uses raw bits, which no version of NumPy changes."""
    count = len(groups) - 1
    bits = np.random.Philox(key=[seed, epoch]).random_raw(2 * count)
    members = groups[:-1] + (bits[count:] % np.diff(groups).astype(np.uint64)).astype(np.int64)
    return members[np.argsort(bits[:count], kind="stable")]


def write_dataset(output: str, facts: dict[str, Any], splits: dict[str, Split]) -> None:
    """Write a folder, local or gs://. `puzzles.json` comes last, so that a folder is complete or is none."""
    target = epath.Path(output)
    counts = {name: split.counts() for name, split in splits.items()}
    for name, split in splits.items():
        (target / name).mkdir(parents=True, exist_ok=True)
        for array, dtype in DTYPES.items():
            with (target / name / f"{array}.npy").open("wb") as file:
                np.save(file, np.asarray(getattr(split, array), dtype))
    text = dumps({"format": 1, **facts, "identifiers": 1, "splits": counts}, indent=1)
    (target / "puzzles.json").write_text(text + "\n")

"""Folders of puzzles and their batches."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.formats import RunFileError
from trainer.puzzles.dataset import PuzzleDataset, Split, epoch_rows, write_dataset

GROUPS = np.array([0, 3, 4, 9, 11, 12])
FACTS = {"kind": "sudoku", "height": 2, "width": 2, "vocabulary": 200}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five groups; the inputs of row r are r + 1, its labels r + 101."""
    cells = np.repeat(np.arange(12, dtype=np.uint8)[:, None], 4, axis=1)
    train = Split(cells + 1, cells + 101, GROUPS, np.array([5, 4, 3, 2, 1]))
    test = Split(cells[:5] + 1, cells[:5] + 101, np.arange(6), np.array([10, 20, 30, 40, -1]))
    write_dataset(str(tmp_path / "d"), FACTS, {"train": train, "test": test})
    return tmp_path / "d"


def rows(data: PuzzleDataset, iteration: int, size: int, seed: int = 7) -> list[int]:
    inputs, labels, ids = data.train_batch(seed, iteration, size)
    assert inputs.dtype == labels.dtype == ids.dtype == np.int32
    assert inputs.shape == (size, 4)
    assert np.array_equal(labels, inputs + 100)
    assert not ids.any()
    return (inputs[:, 0] - 1).tolist()


def test_an_epoch_has_one_member_of_each_group_and_batches_cross_epochs(folder: Path) -> None:
    data = PuzzleDataset.open(str(folder))
    seen = [row for iteration in range(5) for row in rows(data, iteration, 3)]
    for epoch in range(3):
        groups = np.searchsorted(GROUPS, seen[epoch * 5 : epoch * 5 + 5], side="right") - 1
        assert sorted(groups.tolist()) == [0, 1, 2, 3, 4]
    assert seen == [row for epoch in range(3) for row in epoch_rows(GROUPS, 7, epoch).tolist()]
    assert rows(data, 0, 15) == seen, "a batch of several epochs"


def test_a_batch_depends_on_seed_and_iteration_only(folder: Path) -> None:
    first = rows(PuzzleDataset.open(str(folder)), 40, 4)
    data = PuzzleDataset.open(str(folder))
    for other in (3, 90, 41):
        rows(data, other, 4)
    assert rows(data, 40, 4) == first
    assert rows(data, 40, 4, seed=8) != first


def test_members_and_orders_are_drawn_evenly_and_alike_by_every_version() -> None:
    assert epoch_rows(np.arange(0, 101, 10), 0, 0).tolist() == [2, 22, 95, 10, 82, 59, 49, 33, 68, 73]
    epochs = np.stack([epoch_rows(GROUPS, 0, epoch) for epoch in range(4000)])
    for position in (0, 4):
        counts = Counter((np.searchsorted(GROUPS, epochs[:, position], side="right") - 1).tolist())
        assert all(abs(count - 800) < 120 for count in counts.values())
    members = Counter(epochs[(epochs >= 4) & (epochs < 9)].tolist())
    assert all(abs(members[row] - 800) < 120 for row in range(4, 9))


def test_test_batches_come_in_order_with_ratings_and_padding(folder: Path) -> None:
    first, last = PuzzleDataset.open(str(folder)).test_batches(3)
    assert first.inputs[:, 0].tolist() == [1, 2, 3]
    assert (first.size, last.size) == (3, 2)
    assert last.labels[:, 0].tolist() == [104, 105, 0]
    assert last.ratings.tolist() == [40, -1, 0]
    limited = list(PuzzleDataset.open(str(folder)).test_batches(3, limit=4))
    assert [batch.size for batch in limited] == [3, 1]


def change(**facts: Any) -> Callable[[Path], object]:
    """Write puzzles.json with other facts."""
    file, known = "puzzles.json", lambda folder: json.loads((folder / "puzzles.json").read_text())
    return lambda folder: (folder / file).write_text(json.dumps(known(folder) | facts))


def put(name: str, array: Any) -> Callable[[Path], object]:
    return lambda folder: np.save(folder / "train" / name, array)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "puzzles.json").unlink(), "no .*make the folder with `python -m trainer.puzzles`"),
        (lambda folder: (folder / "puzzles.json").write_text("{"), ".*puzzles.json is not JSON"),
        (change(format=2), ".*has format 2; this slipway reads format 1"),
        (change(splits={"train": {"groups": 5, "examples": 12}}), ".*lacks or misstates 'test'"),
        (lambda folder: os.truncate(folder / "train/labels.npy", 150), ".*train/labels.npy cannot be read"),
        (put("inputs.npy", np.ones((11, 4), np.uint8)), "the files of .*/train do not belong together"),
        (put("inputs.npy", np.ones((12, 4), np.int64)), ".*train/inputs.npy is int64 with 2 axes"),
        (put("groups.npy", np.array([0, 3, 3, 9, 11, 12])), ".*train/groups.npy has an empty group"),
        (put("labels.npy", np.full((12, 4), 200, np.uint8)), ".*/train has token 200, but puzzles.json a vocabulary"),
    ],
)
def test_broken_folders_are_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(RunFileError, match=f"^data.path: {message}"):
        PuzzleDataset.open(str(folder)).train_batch(0, 0, 2)

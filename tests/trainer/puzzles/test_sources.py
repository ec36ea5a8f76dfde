"""`python -m trainer.puzzles`: sources, splits, and what it says about broken ones."""

import csv
import re
from itertools import islice
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from trainer.puzzles import sudoku
from trainer.puzzles.__main__ import main
from trainer.puzzles.dataset import PuzzleDataset

COUNT = 40
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def puzzles() -> np.ndarray:
    return np.stack(list(islice(sudoku.generate(4, (5, 8), np.random.default_rng(0), 2 * COUNT), 2 * COUNT)))


def text(board: np.ndarray, blank: str = ".") -> str:
    return "".join(map(str, board)).replace("0", blank)


def lines(puzzles: np.ndarray) -> list[list[str]]:
    return [["made", text(question), text(answer), str(number)] for number, (question, answer) in enumerate(puzzles)]


def write_csv(file: Path, rows: list[list[str]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([["source", "question", "answer", "rating"], *rows])
    return file


@pytest.fixture
def source(tmp_path: Path, puzzles: np.ndarray) -> Path:
    write_csv(tmp_path / "source" / "train.csv", lines(puzzles[:COUNT]))
    write_csv(tmp_path / "source" / "test.csv", lines(puzzles[COUNT:]))
    return tmp_path / "source"


def build(tmp_path: Path, *words: object, name: str = "out") -> PuzzleDataset:
    assert main([*map(str, words), "--output", str(tmp_path / name)]) == 0
    return PuzzleDataset.open(str(tmp_path / name))


def test_a_folder_of_csv_files(tmp_path: Path, source: Path, puzzles: np.ndarray, capsys: Capture) -> None:
    data = build(tmp_path, "sudoku", "--source", source, "--augment", 3)
    assert (data.kind, data.height, data.vocabulary, data.identifiers) == ("sudoku", 4, 6, 1)
    assert data.splits == {"train": {"groups": 40, "examples": 160}, "test": {"groups": 40, "examples": 40}}
    assert np.array_equal(data.train.inputs[::4], puzzles[:COUNT, 0] + 1)
    assert np.array_equal(data.test.labels, puzzles[COUNT:, 1] + 1)
    assert data.train.ratings.tolist() == list(range(40))
    assert sudoku.first_problem(data.train.inputs - 1, data.train.labels - 1) is None
    alike = np.isin(sudoku.signatures(puzzles[COUNT:, 0]), sudoku.signatures(puzzles[:COUNT, 0])).sum()
    assert alike > 0
    assert f"of these {alike} are probably an image of a training puzzle" in capsys.readouterr().out


def test_smaller_sets_are_parts_of_larger_ones(tmp_path: Path, source: Path) -> None:
    small = build(tmp_path, "sudoku", "--source", source, "--subsample", 5, "--augment", 2, name="small").train
    large = build(tmp_path, "sudoku", "--source", source, "--subsample", 20, "--augment", 4, name="large").train
    other = build(tmp_path, "sudoku", "--source", source, "--subsample", 5, "--seed", 1, name="other").train
    rows = [large.ratings.tolist().index(rating) for rating in small.ratings]
    assert np.array_equal(small.inputs.reshape(5, 3, 16), large.inputs.reshape(20, 5, 16)[rows, :3])
    assert small.ratings.tolist() != other.ratings.tolist()


def test_one_csv_file_is_split_between_classes_of_images(tmp_path: Path, source: Path) -> None:
    data = build(tmp_path, "sudoku", "--source", source / "train.csv", "--test", 8, "--min-rating", 2)
    sides = [sudoku.signatures(split.inputs - 1) for split in (data.train, data.test)]
    assert not np.isin(*sides).any()
    assert len(data.test.inputs) == 8
    assert min(data.train.ratings.min(), data.test.ratings.min()) == 2


def test_generated_puzzles_are_no_images_of_each_other(tmp_path: Path, capsys: Capture) -> None:
    words = "sudoku --source generated --cells 16 --subsample 60 --test 40 --augment 2"
    data = build(tmp_path, *words.split())
    boards = np.concatenate([data.train.inputs[::3], data.test.inputs]) - 1
    assert len(set(sudoku.signatures(boards).tolist())) == 100
    assert data.splits["train"] == {"groups": 60, "examples": 180}
    assert "of these none is an image of a training puzzle" in capsys.readouterr().out


def test_the_arrays_of_the_study(tmp_path: Path, puzzles: np.ndarray) -> None:
    """int64 tokens, groups of two, as its builder writes them."""
    for split, part in (("train", puzzles[:COUNT]), ("test", puzzles[COUNT:])):
        folder = tmp_path / "arrays" / split
        folder.mkdir(parents=True)
        (folder / "dataset.json").write_text("{}")
        arrays = {"inputs": part[:, 0] + np.int64(1), "labels": part[:, 1] + np.int64(1)}
        arrays |= {"puzzle_identifiers": np.zeros(COUNT), "puzzle_indices": np.arange(COUNT + 1)}
        for name, array in {**arrays, "group_indices": np.arange(0, COUNT + 1, 2)}.items():
            np.save(folder / f"all__{name}.npy", array)
    data = build(tmp_path, "sudoku", "--source", tmp_path / "arrays")
    assert data.splits["train"] == {"groups": 20, "examples": 40}
    assert np.array_equal(data.train.labels, puzzles[:COUNT, 1] + 1)


BROKEN = {
    "length": (1, lambda text: text[:-1], r"question has 15 characters, not 16"),
    "character": (1, lambda text: "x" + text[1:], r"question has 'x' at character 1; known are '01234'"),
    "digit": (2, lambda text: "7" + text[1:], r"answer has '7' at character 1"),
    "contradiction": (2, lambda text: text.translate(str.maketrans("1234", "2341")), r".* contradicts"),
    "rules": (2, lambda text: text[:-1] + "1234"["1234".index(text[-1]) - 1], r"the solution"),
    "rating": (3, lambda text: "hard", r"rating 'hard' is no number"),
    "not ascii": (1, lambda text: "é" + text[1:], r"question has 'é' at character 1"),
}


def refused(words: list[str], tmp_path: Path, capsys: Capture) -> str:
    """The one line that is said."""
    assert main(["sudoku", *words, "--output", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    (error,) = capsys.readouterr().err.splitlines()
    return error


@pytest.mark.parametrize("case", BROKEN)
def test_broken_lines_are_named(tmp_path: Path, source: Path, puzzles: np.ndarray, case: str, capsys: Capture) -> None:
    column, damage, message = BROKEN[case]
    rows = lines(puzzles[:COUNT])
    rows[10][column] = damage(rows[10][column])
    write_csv(source / "train.csv", rows)
    assert re.search(f"train.csv:12: {message}", refused(["--source", str(source)], tmp_path, capsys))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("SOURCE/none", "SOURCE/none/train.csv does not exist"),
        ("SOURCE/train.csv --test 400", "40 puzzles are too few for --test 400 and --subsample 1"),
        ("SOURCE --subsample 41", "train.csv: 40 puzzles, but 41 wanted"),
        ("generated --side 4 --clues 16 --test 9", "puzzles of side 4 differ; ask for fewer"),
    ],
)
def test_other_bad_input(words: str, message: str, source: Path, tmp_path: Path, capsys: Capture) -> None:
    words, message = (text.replace("SOURCE", str(source)) for text in (f"--source {words}", message))
    assert message in refused(words.split(), tmp_path, capsys)


def test_a_data_set_of_the_hub(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    asked = []

    def download(repository: str, file: str, repo_type: str) -> str:
        asked.append((repository, file, repo_type))
        if repository == "nobody/nothing":
            raise LocalEntryNotFoundError("no network\nand more")
        return str(source / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert build(tmp_path, "sudoku", "--source", "hf://me/sudoku", "--test", 10).splits["test"]["examples"] == 10
    assert asked == [("me/sudoku", "train.csv", "dataset"), ("me/sudoku", "test.csv", "dataset")]
    assert main(["sudoku", "--source", "hf://nobody/nothing", "--output", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == "--source: cannot download train.csv of hf://nobody/nothing: no network\n"


SUDOKU_EXTREME = Path(__file__).with_name("sudoku_extreme")
"""train.csv and test.csv in the layout of the published files, with generated puzzles."""


def test_sudoku_extreme_is_read_as_its_authors_builder_reads_it(tmp_path: Path) -> None:
    """dataset/build_sudoku_dataset.py takes columns by position: blanks are dots, a token is the digit + 1."""
    data = build(tmp_path, "sudoku", "--source", SUDOKU_EXTREME, "--augment", 5)
    assert (data.height, data.width, data.vocabulary, data.cells) == (9, 9, 11, 81)
    for split, read, step in (("train", data.train, 6), ("test", data.test, 1)):
        header, *rows = (SUDOKU_EXTREME / f"{split}.csv").read_text().splitlines()
        assert header == "source,question,answer,rating"
        theirs = [row.split(",") for row in rows]
        for array, column in ((read.inputs, 1), (read.labels, 2)):
            tokens = [[ord(cell) - ord("0") + 1 for cell in row[column].replace(".", "0")] for row in theirs]
            np.testing.assert_array_equal(array[::step], tokens)
        assert read.ratings.tolist() == [int(row[3]) for row in theirs]
        assert read.groups.tolist() == [step * i for i in range(len(theirs) + 1)]
    harder = build(tmp_path, "sudoku", "--source", SUDOKU_EXTREME, "--min-rating", 10, name="hard")
    assert min(harder.train.ratings) >= 10


def test_mazes_have_symmetries_and_may_have_any_rating(tmp_path: Path) -> None:
    """Spaces at both ends of a board are cells. The columns of three rows: ` S `, ` # `, `G  `."""
    rows = [["made", " S  # G  ", "oS o# G  ", rating] for rating in ("112.5", "")]
    for split in ("train", "test"):
        write_csv(tmp_path / "mazes" / f"{split}.csv", rows)
    words = ("maze", "--source", tmp_path / "mazes")
    data = build(tmp_path, *words, "--augment", 7)
    assert (data.kind, data.vocabulary) == ("maze", 6)
    assert data.train.ratings.tolist() == [-1, -1]
    assert data.train.inputs[0].tolist() == [2, 3, 2, 2, 1, 2, 4, 2, 2]
    assert data.test.labels[0].tolist()[:4] == [5, 3, 2, 5]
    assert len(np.unique(data.train.inputs, axis=0)) == 8
    assert main([*map(str, words), "--min-rating", "1", "--output", str(tmp_path / "no")]) == 2

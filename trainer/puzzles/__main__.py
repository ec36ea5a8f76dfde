"""Build a folder of puzzles for `loop.kind=puzzle`.

    python -m trainer.puzzles sudoku --source hf://sapientinc/sudoku-extreme --subsample 1000 --augment 1000 --output D
    python -m trainer.puzzles sudoku --source generated --side 4 --subsample 500 --augment 20 --output D
    python -m trainer.puzzles maze --source hf://sapientinc/maze-30x30-hard-1k --augment 7 --output D

--source is `generated`, a folder or data set of the Hugging Face Hub with train.csv and test.csv, one CSV file (then
--test of its puzzles are held out), or a folder that the study's own builder wrote, which is converted as it is.
Exit codes: 0 done, 2 bad arguments or data.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from math import isqrt
from zlib import crc32

import numpy as np

from conf.formats import RunFileError
from trainer.corpus import files
from trainer.puzzles import maze, sources, sudoku
from trainer.puzzles.dataset import SPLITS, Split, write_dataset
from trainer.puzzles.sources import MAZE, SUDOKU, Kind, Puzzles

GENERATED = "generated"
GENERATED_TEST, GENERATED_TRAIN = 1000, 1000
CLUES = {4: (6, 9), 9: (30, 40)}
"""Fewest and most clues of generated puzzles, by side."""
MOST_REPEATS = 1000
"""Generated puzzles in a row that are images of known ones, before none is expected that is not."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    files.use_buckets()
    kind = SUDOKU if options.kind == "sudoku" else MAZE
    try:
        train, test = _read(kind, options)
        if train.questions.shape[1] != test.questions.shape[1]:
            raise RunFileError(f"--source {options.source}: training and test puzzles differ in size")
        images = int(
            np.isin(kind.signatures(test.questions), kind.signatures(train.questions[train.groups[:-1]])).sum()
        )
        if options.augment:
            train = _augmented(kind, train, options.augment, options.seed)
        side = round(train.questions.shape[1] ** 0.5)
        facts = {"kind": kind.name, "height": side, "width": side, "vocabulary": len(kind.characters(side)) + 1}
        splits = {name: _split(puzzles) for name, puzzles in zip(SPLITS, (train, test), strict=True)}
        write_dataset(options.output, {**facts, "test_images": images}, splits)
    except RunFileError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"--output {options.output}: {error}", file=sys.stderr)
        return 2
    shown = "none is" if not images else f"{images} are probably"
    print(
        f"{options.output}: {len(train.groups) - 1} puzzles in {len(train.questions)} forms for training, "
        f"{len(test.questions)} for testing; of these {shown} an image of a training puzzle"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.puzzles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="sudoku | maze")
    at_least_0, at_least_1 = partial(_parse_count, 0), partial(_parse_count, 1)
    for kind in (
        sudoku_parser := kinds.add_parser("sudoku", help="puzzles of 4 x 4 or 9 x 9 cells"),
        maze_parser := kinds.add_parser("maze", help="shortest paths through mazes"),
    ):
        kind.add_argument("--source", required=True, help="generated, hf://OWNER/NAME, a folder or a CSV file")
        kind.add_argument("--output", required=True, metavar="FOLDER", help="folder to write, local or gs://…")
        many = "number of training puzzles, drawn by --seed (default: all; generated: 1000)"
        kind.add_argument("--subsample", type=at_least_1, metavar="N", help=many)
        many = "number of test puzzles (default: all; of a CSV file or generated: 1000)"
        kind.add_argument("--test", type=at_least_1, metavar="N", help=many)
        kind.add_argument("--min-rating", type=at_least_0, metavar="R", help="leave out puzzles with a lower rating")
        kind.add_argument("--seed", type=at_least_0, default=0, metavar="N", help="random seed (default: 0)")
    many = "random images of each training puzzle (default: 0)"
    sudoku_parser.add_argument("--augment", type=at_least_0, default=0, metavar="N", help=many)
    side = "side of generated puzzles: 4 or 9 (default: 9)"
    sudoku_parser.add_argument("--side", type=int, choices=[4, 9], default=9, metavar="N", help=side)
    sudoku_parser.add_argument(
        "--cells", dest="side", type=_parse_cells, metavar="N", help="the same as cells: 16 or 81"
    )
    clues = "clues of generated puzzles, such as 30 or 30-40; more clues are easier"
    sudoku_parser.add_argument("--clues", type=_parse_clues, metavar="RANGE", help=clues)
    many = "symmetric images of each training puzzle, at most 7 (default: 0)"
    maze_parser.add_argument("--augment", type=at_least_0, choices=range(8), default=0, metavar="N", help=many)
    return parser


def _parse_count(least: int, word: str) -> int:
    if (count := int(word)) < least:
        raise argparse.ArgumentTypeError(f"at least {least}")
    return count


def _parse_cells(word: str) -> int:
    if word not in ("16", "81"):
        raise argparse.ArgumentTypeError("16 or 81")
    return isqrt(int(word))


def _parse_clues(word: str) -> tuple[int, int]:
    low, _, high = word.partition("-")
    if not low.isdecimal() or not (high or low).isdecimal() or int(high or low) < int(low):
        raise argparse.ArgumentTypeError("a number or a range such as 30-40")
    return int(low), int(high or low)


def _read(kind: Kind, options: argparse.Namespace) -> tuple[Puzzles, Puzzles]:
    source, limit, seed, least = options.source, options.subsample, options.seed, options.min_rating
    if source == GENERATED:
        if kind is not SUDOKU:
            raise RunFileError("--source generated: only sudoku can be generated")
        return _generated(options)
    if sources.is_arrays(source):
        if limit or options.augment or options.test or least:
            raise RunFileError(
                f"--source {source}: its builder has chosen and augmented the puzzles; leave the flags out"
            )
        train, test = (sources.read_arrays(source, split, kind) for split in SPLITS)
        return train, test
    if not source.endswith(".csv"):
        train_file, test_file = (sources.split_file(source, split) for split in SPLITS)
        train = sources.read_csv(train_file, kind, limit, seed, least)
        return train, sources.read_csv(test_file, kind, options.test, seed, least)
    return _hold_out(kind, sources.read_csv(source, kind, None, seed, least), options)


def _hold_out(kind: Kind, puzzles: Puzzles, options: argparse.Namespace) -> tuple[Puzzles, Puzzles]:
    """Split the puzzles of one file at random; images of each other stay on one side."""
    _, classes = np.unique(kind.signatures(puzzles.questions), return_inverse=True)
    keys = np.random.default_rng(options.seed).random(len(classes))[classes]
    order = np.argsort(keys, kind="stable")
    wanted = options.test or GENERATED_TEST
    held = keys[order] <= keys[order[min(wanted, len(order)) - 1]]
    train = order[~held][: options.subsample]
    if not len(train) or len(train) < (options.subsample or 0):
        message = f"{len(order)} puzzles are too few for --test {wanted} and --subsample {options.subsample or 1}"
        raise RunFileError(f"--source {options.source}: {message}")
    return _choose(puzzles, train), _choose(puzzles, order[held][:wanted])


def _choose(puzzles: Puzzles, rows: np.ndarray) -> Puzzles:
    return Puzzles(puzzles.questions[rows], puzzles.answers[rows], puzzles.ratings[rows], np.arange(len(rows) + 1))


def _generated(options: argparse.Namespace) -> tuple[Puzzles, Puzzles]:
    """Generate puzzles of which no two are images of each other."""
    test, train = options.test or GENERATED_TEST, options.subsample or GENERATED_TRAIN
    random = np.random.default_rng(options.seed)
    found: dict[int, np.ndarray] = {}
    repeats = 0
    for puzzle in sudoku.generate(options.side, options.clues or CLUES[options.side], random):
        repeats += 1
        if (signature := int(sudoku.signatures(puzzle[:1])[0])) not in found:
            found[signature], repeats = puzzle, 0
        if len(found) == test + train:
            break
        if repeats > MOST_REPEATS:
            raise RunFileError(
                f"--source generated: only {len(found)} puzzles of side {options.side} differ; ask for fewer"
            )
    boards = np.stack(list(found.values()))
    all_puzzles = Puzzles(boards[:, 0], boards[:, 1], np.full(len(boards), -1, np.int32), np.arange(len(boards) + 1))
    return _choose(all_puzzles, np.arange(test, test + train)), _choose(all_puzzles, np.arange(test))


def _augmented(kind: Kind, puzzles: Puzzles, count: int, seed: int) -> Puzzles:
    """Add images after each puzzle. A puzzle's random images do not depend on the other puzzles."""
    cells = puzzles.questions.shape[1]
    boards = np.empty((2, len(puzzles.questions), 1 + count, cells), np.uint8)
    for number, pair in enumerate(zip(puzzles.questions, puzzles.answers, strict=True)):
        both = np.stack(pair)
        random = np.random.default_rng([seed, crc32(both.tobytes())])
        boards[:, number, 0] = both
        boards[:, number, 1:] = sudoku.augment(both, count, random) if kind is SUDOKU else maze.augment(both, count)
    questions, answers = boards.reshape(2, -1, cells)
    return Puzzles(questions, answers, puzzles.ratings, np.arange(len(puzzles.questions) + 1) * (1 + count))


def _split(puzzles: Puzzles) -> Split:
    return Split(puzzles.questions + 1, puzzles.answers + 1, puzzles.groups, puzzles.ratings)


if __name__ == "__main__":
    sys.exit(main())

"""The rules and symmetries of sudoku, and generated puzzles."""

from itertools import islice

import numpy as np
import pytest

from trainer.puzzles import maze, sudoku

EMPTY = np.zeros(81, np.uint8)


def generated(side: int, clues: tuple[int, int], count: int, seed: int = 0) -> np.ndarray:
    return np.stack(list(islice(sudoku.generate(side, clues, np.random.default_rng(seed), count), count)))


@pytest.mark.parametrize(("side", "clues", "count"), [(4, (5, 8), 30), (9, (36, 40), 3)])
def test_generated_puzzles_have_one_solution_and_the_clues(side: int, clues: tuple[int, int], count: int) -> None:
    puzzles = generated(side, clues, count)
    assert sudoku.first_problem(puzzles[:, 0], puzzles[:, 1]) is None
    assert [len(sudoku.solutions(question, 2)) for question, _ in puzzles] == [1] * count
    found = (puzzles[:, 0] > 0).sum(1)
    assert clues[0] <= found.min() <= found.max() <= clues[1] + (2 if side == 9 else 0)
    different = len(set(sudoku.signatures(puzzles[:, 0]).tolist()))
    assert different > count // 2 if side == 4 else different == count
    assert np.array_equal(puzzles, generated(side, clues, count)), "the seed determines them"


def test_the_solver_finds_each_solution_once_and_none_of_a_contradiction() -> None:
    question, answer = generated(4, (6, 6), 1)[0]
    assert [found.tolist() for found in sudoku.solutions(question)] == [answer.tolist()]
    grids = {found.tobytes() for found in sudoku.solutions(np.zeros(16, np.uint8), 1000)}
    assert len(grids) == 288  # a known number
    assert len(sudoku.solutions(EMPTY, 3)) == 3
    assert sudoku.solutions(np.array([1, 1] + [0] * 14, np.uint8)) == []


def test_images_are_puzzles_with_the_images_of_their_solutions() -> None:
    pair = generated(9, (36, 36), 1)[0]
    questions, answers = sudoku.augment(pair, 300, np.random.default_rng(1))
    assert sudoku.first_problem(questions, answers) is None
    assert len(np.unique(questions, axis=0)) == 300
    assert len(set(sudoku.signatures(np.concatenate([pair[:1], questions])).tolist())) == 1
    fewer = sudoku.augment(pair, 7, np.random.default_rng(1))
    assert np.array_equal(fewer, np.stack([questions, answers])[:, :7]), "100 images are the first of 1000"


def test_images_reach_every_symmetry() -> None:
    """Swaps of digits, rows and bands, and the transposition, make so many boards of this one."""
    board = np.zeros(16, np.uint8)
    board[[0, 6, 7]] = [1, 2, 2]
    boards = sudoku.augment(board[None], 30_000, np.random.default_rng(0))[0]
    images, counts = np.unique(boards, axis=0, return_counts=True)
    assert len(images) == 384
    assert counts.min() > counts.mean() / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": {5: 0}}, "the solution has no digit in row 2, column 2"),
        ({"question": {5: "other"}}, "the solution contradicts the question in row 2, column 2"),
        ({"question": {5: 0}, "answer": {5: "other"}}, "the solution breaks the rules: row 2 has"),
    ],
)
def test_the_first_wrong_puzzle_is_found(change: dict[str, dict[int, int | str]], message: str) -> None:
    puzzles = generated(4, (16, 16), 20)
    for name, cells in change.items():
        for cell, value in cells.items():
            board = puzzles[13, ("question", "answer").index(name)]
            board[cell] = board[cell] % 4 + 1 if value == "other" else value
    found = sudoku.first_problem(puzzles[:, 0], puzzles[:, 1])
    assert found is not None
    assert found[0] == 13
    assert found[1].startswith(message)


QUESTION = "S # " + "    " + " ## " + "   G"
ANSWER = "So# " + " ooo" + " ##o" + "   G"


def codes(text: str) -> np.ndarray:
    return np.array([maze.CHARACTERS.index(character) for character in text], np.uint8)


def test_images_are_mazes_and_all_eight_differ() -> None:
    pair = np.stack([codes(QUESTION), codes(ANSWER)])
    questions, answers = maze.augment(pair, 7)
    assert maze.first_problem(questions, answers) is None
    assert len({board.tobytes() for board in [pair[0], *questions]}) == 8
    assert np.array_equal(maze.augment(pair, 3), maze.augment(pair, 7)[:, :3])
    assert len(set(maze.signatures(np.stack([pair[0], *questions])).tolist())) == 1
    assert maze.signatures(codes("S" + QUESTION[1:3] + "#" + QUESTION[4:])[None])[0] != maze.signatures(pair[:1])[0]


@pytest.mark.parametrize(
    ("question", "answer", "message"),
    [
        (QUESTION.replace("G", " "), ANSWER.replace("G", " "), "the question has 0 cells G, not 1"),
        (QUESTION, ANSWER.replace("##", "#o"), "the solution contradicts the question in row 3, column 3: 'o' instead"),
        (QUESTION, ANSWER.replace("ooo", "o o"), "the solution breaks the rules: its cells o do not lead from S to G"),
        (QUESTION, "So#o" + ANSWER[4:8].replace("ooo", "oo ") + ANSWER[8:], "the solution breaks the rules"),
    ],
)
def test_what_is_wrong_is_named(question: str, answer: str, message: str) -> None:
    questions, answers = (np.stack([codes(good), codes(bad)]) for good, bad in ((QUESTION, question), (ANSWER, answer)))
    found = maze.first_problem(questions, answers)
    assert found is not None
    assert found[0] == 1
    assert found[1].startswith(message)

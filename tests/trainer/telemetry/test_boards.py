"""Pictures of boards: their colors and sizes."""

from __future__ import annotations

import numpy as np

from trainer.telemetry.boards import CLUE, MAZE, WHITE, WRONG, draw_puzzle

SUDOKU = {"kind": "sudoku", "width": 4, "puzzle": "1...............", "solution": "1234341221434321",
          "steps": {"1": "1334341221434321", "4": "1234341221434321"}}  # fmt: skip
MAZE_BOARD = {"kind": "maze", "width": 3, "puzzle": "S.G##.###", "solution": "SoG##.###",
              "steps": {"1": "S.G##o###"}}  # fmt: skip


def colors(picture: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(pixel) for pixel in picture.reshape(-1, 3).tolist()}


def test_wrong_cells_are_red_and_clues_gray() -> None:
    picture = np.asarray(draw_puzzle(SUDOKU))
    puzzle, first, last = (picture[:, x : x + 145] for x in (8, 161, 314))
    assert WRONG in colors(first)
    assert WRONG not in colors(puzzle) | colors(last)
    for panel in (puzzle, first, last):
        assert tuple(panel[10, 3].tolist()) == CLUE, "the first cell, beside its digit"
    assert tuple(first[10, 39].tolist()) == WRONG, "the second cell"
    assert tuple(first[10, 75].tolist()) == WHITE, "the third"


def test_a_maze_shows_the_way_and_what_is_wrong_with_it() -> None:
    """The model leaves out a cell of the way and adds one: both have a red frame, around what the model says."""
    first = np.asarray(draw_puzzle(MAZE_BOARD))[8:, 161:]
    missing, added = first[:48, 48:96], first[48:96, 96:144]
    assert [tuple(cell[24, 24].tolist()) for cell in (missing, added)] == [WHITE, MAZE["o"]]
    assert [tuple(cell[24, 1].tolist()) for cell in (missing, added)] == [WRONG, WRONG]
    assert tuple(first[24, 24].tolist()) == MAZE["S"]


def test_many_steps_continue_in_further_rows() -> None:
    steps = {str(n): SUDOKU["solution"] for n in range(1, 8)}
    assert draw_puzzle(SUDOKU | {"steps": steps}).size == (4 * 153 + 8, 2 * 153 + 8)

"""Pictures of boards: their colors, and a PNG file that a decoder of a few lines reads."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from trainer.telemetry.boards import CLUE, MAZE, WHITE, WRONG, draw_puzzle, encode_png

SUDOKU = {"kind": "sudoku", "width": 4, "puzzle": "1...............", "solution": "1234341221434321",
          "steps": {"1": "1334341221434321", "4": "1234341221434321"}}  # fmt: skip
MAZE_BOARD = {"kind": "maze", "width": 3, "puzzle": "S.G##.###", "solution": "SoG##.###",
              "steps": {"1": "S.G##o###"}}  # fmt: skip


def colors(picture: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(pixel) for pixel in picture.reshape(-1, 3).tolist()}


def test_wrong_cells_are_red_and_clues_gray() -> None:
    picture = draw_puzzle(SUDOKU)
    puzzle, first, last = (picture[:, x : x + 145] for x in (8, 161, 314))
    assert WRONG in colors(first)
    assert WRONG not in colors(puzzle) | colors(last)
    for panel in (puzzle, first, last):
        assert tuple(panel[10, 3].tolist()) == CLUE, "the first cell, beside its digit"
    assert tuple(first[10, 39].tolist()) == WRONG, "the second cell"
    assert tuple(first[10, 75].tolist()) == WHITE, "the third"


def test_a_maze_shows_the_way_and_what_is_wrong_with_it() -> None:
    """The model leaves out a cell of the way and adds one: both have a red frame, around what the model says."""
    first = draw_puzzle(MAZE_BOARD)[8:, 161:]
    missing, added = first[:48, 48:96], first[48:96, 96:144]
    assert [tuple(cell[24, 24].tolist()) for cell in (missing, added)] == [WHITE, MAZE["o"]]
    assert [tuple(cell[24, 1].tolist()) for cell in (missing, added)] == [WRONG, WRONG]
    assert tuple(first[24, 24].tolist()) == MAZE["S"]


def test_many_steps_continue_in_further_rows() -> None:
    steps = {str(n): SUDOKU["solution"] for n in range(1, 8)}
    assert draw_puzzle(SUDOKU | {"steps": steps}).shape == (2 * 153 + 8, 4 * 153 + 8, 3)


def test_a_png_file_holds_the_picture() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    file = encode_png(picture)
    assert file[:8] == bytes([137, 80, 78, 71, 13, 10, 26, 10])
    at, chunks = 8, {}
    while at < len(file):
        size, kind = struct.unpack(">I4s", file[at : at + 8])
        data = file[at + 8 : at + 8 + size]
        assert struct.unpack(">I", file[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + data)
        chunks[kind], at = data, at + 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (7, 5, 8, 2, 0, 0, 0)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(5, 22)
    assert not rows[:, 0].any(), "no filter"
    np.testing.assert_array_equal(rows[:, 1:].reshape(5, 7, 3), picture)

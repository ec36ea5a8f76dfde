"""Pictures of puzzles for TensorBoard: the clues and the answer after each step, wrong cells on red."""

import struct
import zlib
from typing import Any

import numpy as np

PANELS = 4
"""Boards in a row of the picture."""
SIZE, LEAST = 144, 8
"""Pixels of a board's side, about, and of a cell's at least."""
GAP, LINE, FRAME = 8, 1, 2
INK, CLUE, ANSWER, WRONG, RULE = (28, 30, 33), (225, 226, 222), (31, 95, 191), (200, 30, 30), (140, 140, 140)
WHITE = (255, 255, 255)
MAZE = {"#": (60, 64, 70), "S": (27, 138, 90), "G": (168, 121, 0), "o": (31, 95, 191)}
FONT = {
    "1": "010 110 010 010 111", "2": "111 001 111 100 111", "3": "111 001 011 001 111", "4": "101 101 111 001 001",
    "5": "111 100 111 001 111", "6": "111 100 111 101 111", "7": "111 001 010 010 010", "8": "111 101 111 101 111",
    "9": "111 101 111 001 111",
}  # fmt: skip


def draw_puzzle(board: dict[str, Any]) -> np.ndarray:
    """Return a picture, uint8 [height, width, 3], of a board of `evaluation.puzzles.board`."""
    panels = [_draw(board, board["puzzle"]), *(_draw(board, cells) for cells in board["steps"].values())]
    side = len(panels[0]) + GAP
    columns, rows = min(PANELS, len(panels)), -(-len(panels) // PANELS)
    picture = np.full((rows * side + GAP, columns * side + GAP, 3), 255, np.uint8)
    for i, panel in enumerate(panels):
        y, x = GAP + i // PANELS * side, GAP + i % PANELS * side
        picture[y : y + len(panel), x : x + len(panel)] = panel
    return picture


def _draw(board: dict[str, Any], cells: str) -> np.ndarray:
    width = board["width"]
    size = max(LEAST, SIZE // width)
    panel = np.empty((width * size + LINE, width * size + LINE, 3), np.uint8)
    panel[:] = RULE
    box = 0 if board["kind"] == "maze" else round(width**0.5)
    for i, cell in enumerate(cells):
        y, x = (n * size for n in divmod(i, width))
        solution = board["solution"][i]
        wrong, clue = cells is not board["puzzle"] and solution not in ("?", cell), board["puzzle"][i] == cell
        square = panel[y : y + size + LINE, x : x + size + LINE]
        if not box:
            square[:] = WRONG if wrong else MAZE.get(cell, WHITE)
            square[FRAME : size - FRAME, FRAME : size - FRAME] = MAZE.get(cell, WHITE)
            continue
        square[LINE:-LINE, LINE:-LINE] = WRONG if wrong else CLUE if clue and cell != "." else WHITE
        if cell in FONT:
            glyph = np.array([[mark == "1" for mark in row] for row in FONT[cell].split()])
            glyph = glyph.repeat(size // 8, 0).repeat(size // 8, 1)
            top, left = (size + LINE - glyph.shape[0]) // 2, (size + LINE - glyph.shape[1]) // 2
            inside = square[top : top + glyph.shape[0], left : left + glyph.shape[1]]
            inside[glyph] = WHITE if wrong else INK if clue else ANSWER
    for at in range(0, width + 1, box or width):
        panel[at * size : at * size + LINE] = panel[:, at * size : at * size + LINE] = INK
    return panel


def encode_png(picture: np.ndarray) -> bytes:
    """Return a PNG file (https://www.w3.org/TR/png-3/): three chunks, rows without a filter."""
    height, width, _ = picture.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    framed = (struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x)) for kind, x in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)

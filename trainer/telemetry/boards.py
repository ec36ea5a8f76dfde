"""Pictures of puzzles for TensorBoard: the clues and the answer after each step, wrong cells on red."""

from typing import Any

from PIL import Image, ImageDraw

PANELS = 4
"""Boards in a row of the picture."""
SIZE, LEAST = 144, 8
"""Pixels of a board's side, about, and of a cell's at least."""
GAP, FRAME = 8, 2
INK, CLUE, ANSWER, WRONG, RULE = (28, 30, 33), (225, 226, 222), (31, 95, 191), (200, 30, 30), (140, 140, 140)
WHITE = (255, 255, 255)
MAZE = {"#": (60, 64, 70), "S": (27, 138, 90), "G": (168, 121, 0), "o": (31, 95, 191)}


def draw_puzzle(board: dict[str, Any]) -> Image.Image:
    """Return a picture of a board of `evaluation.puzzles.board`."""
    panels = [_draw(board, board["puzzle"]), *(_draw(board, cells) for cells in board["steps"].values())]
    side = panels[0].width + GAP
    columns, rows = min(PANELS, len(panels)), -(-len(panels) // PANELS)
    picture = Image.new("RGB", (columns * side + GAP, rows * side + GAP), WHITE)
    for i, panel in enumerate(panels):
        picture.paste(panel, (GAP + i % PANELS * side, GAP + i // PANELS * side))
    return picture


def _draw(board: dict[str, Any], cells: str) -> Image.Image:
    width, is_maze = board["width"], board["kind"] == "maze"
    size = max(LEAST, SIZE // width)
    panel = Image.new("RGB", (width * size + 1, width * size + 1), RULE)
    draw = ImageDraw.Draw(panel)
    for i, cell in enumerate(cells):
        y, x = (n * size for n in divmod(i, width))
        wrong = cells is not board["puzzle"] and board["solution"][i] not in ("?", cell)
        clue = board["puzzle"][i] == cell
        if is_maze:
            color = MAZE.get(cell, WHITE)
            draw.rectangle((x, y, x + size, y + size), color, outline=WRONG if wrong else color, width=FRAME)
            continue
        paper = WRONG if wrong else CLUE if clue and cell != "." else WHITE
        draw.rectangle((x + 1, y + 1, x + size - 1, y + size - 1), paper)
        if cell != ".":
            ink = WHITE if wrong else INK if clue else ANSWER
            draw.text((x + size / 2 + 1, y + size / 2 + 1), cell, ink, anchor="mm", font_size=size * 0.7)
    for at in range(0, width + 1, width if is_maze else round(width**0.5)):
        draw.line((at * size, 0, at * size, width * size), INK)
        draw.line((0, at * size, width * size, at * size), INK)
    return panel

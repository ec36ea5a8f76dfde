"""Boards of solved puzzles as inline SVG: the clues, the answer after each step, wrong cells on red."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from controller.core.text import plural
from controller.report.markup import add_child

MAX_WIDTH, MAX_STEPS, MAX_SHOWN = 40, 256, 7
"""Cells of a side, steps of a document, and answers that are drawn."""
CELL = 16
SYMBOLS = {"sudoku": "?.123456789", "maze": "?#.SGo"}
"""Characters of a cell: `?` does not count, `.` is empty, `o` is the way through a maze."""


@dataclass(frozen=True)
class Board:
    """A puzzle as `trainer.evaluation.puzzles.board` writes it: a character per cell, answers by step."""

    kind: str
    width: int
    puzzle: str
    solution: str
    steps: Mapping[int, str]

    def wrong(self, cells: str) -> list[int]:
        return [i for i, (a, b) in enumerate(zip(cells, self.solution, strict=True)) if a != b and b != "?"]

    @property
    def shown_steps(self) -> list[int]:
        """Return the steps to draw: all, or some of them at equal distances, with the first and the last."""
        steps = sorted(self.steps)
        if len(steps) <= MAX_SHOWN:
            return steps
        return [steps[round(i * (len(steps) - 1) / (MAX_SHOWN - 1))] for i in range(MAX_SHOWN)]


def parse_board(document: Any) -> Board | None:
    """Return the board of a transcript; None for anything that no trainer writes."""
    if not isinstance(document, dict):
        return None
    kind, width, steps = document.get("kind"), document.get("width"), document.get("steps")
    symbols = SYMBOLS.get(kind) if isinstance(kind, str) else None
    if symbols is None or not isinstance(width, int) or not 0 < width <= MAX_WIDTH or not isinstance(steps, dict):
        return None
    numbers = [name for name in steps if isinstance(name, str) and name.isdecimal() and len(name) < 6]
    boards = [document.get("puzzle"), document.get("solution"), *(steps[name] for name in numbers)]
    if not numbers or len(numbers) != len(steps) or len(steps) > MAX_STEPS:
        return None
    if not all(isinstance(cells, str) and len(cells) == width * width for cells in boards):
        return None
    if any(cell not in symbols for cells in boards for cell in cells):
        return None
    puzzle, solution, *answers = boards
    return Board(str(kind), width, puzzle, solution, {int(n): a for n, a in zip(numbers, answers, strict=True)})


def draw_boards(parent: Element, board: Board, title: str) -> None:
    """Add a row of figures: the puzzle, and the answer after each step that is shown."""
    add_child(parent, "p", title, class_="soft")
    row = add_child(parent, "div", class_="boards")
    _figure(row, board, board.puzzle, "puzzle", [])
    for step in board.shown_steps:
        wrong = board.wrong(board.steps[step])
        said = f"{plural(len(wrong), 'wrong cell')}" if wrong else "solved"
        _figure(row, board, board.steps[step], f"step {step}: {said}", wrong)


def _figure(parent: Element, board: Board, cells: str, caption: str, wrong: list[int]) -> None:
    figure = add_child(parent, "figure")
    side = board.width * CELL
    svg = add_child(
        figure, "svg", class_=f"board {board.kind}", viewBox=f"-1 -1 {side + 2} {side + 2}", role="img",
        aria_label=caption,
    )  # fmt: skip
    add_child(svg, "rect", class_="paper", width=side, height=side)
    clues = [i for i, cell in enumerate(board.puzzle) if cell not in ".?"]
    if board.kind == "maze":
        for name, symbol in (("wall", "#"), ("way", "o"), ("start", "S"), ("goal", "G")):
            _squares(svg, name, [i for i, cell in enumerate(cells) if cell == symbol], board.width)
        _squares(svg, "wrong", wrong, board.width)
    else:
        _squares(svg, "clue", [i for i in clues if cells[i] == board.puzzle[i]], board.width)
        _squares(svg, "wrong", wrong, board.width)
        given = {i for i in clues if cells[i] == board.puzzle[i]}
        for name, chosen in (("given", given), ("", set(range(len(cells))) - given)):
            for text, xs, y in _digits(cells, chosen, board.width):
                add_child(svg, "text", text, class_=name or None, x=xs, y=y)
        box = round(board.width**0.5)
        for class_, gap in (("grid", 1), ("box", box)):
            at = range(0, side + 1, gap * CELL)
            add_child(svg, "path", class_=class_, d="".join(f"M{n} 0V{side}M0 {n}H{side}" for n in at))
    add_child(figure, "figcaption", caption)


def _squares(svg: Element, name: str, chosen: list[int], width: int) -> None:
    """Add the chosen cells as one path."""
    corners = ((i % width * CELL, i // width * CELL) for i in chosen)
    path = "".join(f"M{x} {y}h{CELL}v{CELL}h-{CELL}z" for x, y in corners)
    if path:
        add_child(svg, "path", class_=name, d=path)


def _digits(cells: str, chosen: set[int], width: int) -> Iterator[tuple[str, str, int]]:
    """Yield the text of each row of cells, the x of each character, and the y of the row."""
    for y in range(width):
        shown = [i for i in range(y * width, (y + 1) * width) if i in chosen and cells[i] not in ".?"]
        if shown:
            xs = " ".join(str(i % width * CELL + CELL // 2) for i in shown)
            yield "".join(cells[i] for i in shown), xs, y * CELL + 12

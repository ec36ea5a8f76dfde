"""Metrics of solved puzzles, and the boards that people look at, as text and as pictures for TensorBoard."""

from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from trainer.evaluation.statistics import wilson_interval
from trainer.telemetry.metrics import Transcript


def puzzle_metrics(solved: dict[str, np.ndarray], ratings: np.ndarray) -> dict[str, float]:
    """Return the metrics of `losses.puzzle.build_eval`'s results for all puzzles.

    eval_exact_accuracy, the share with every cell right, has a 95 % interval. eval_halt_steps is the mean step at which
    the halting logit is first positive, or the last, and eval_exact_at_halt the share that is right there. Curves with
    a slash in their names: the share after each step, and by rating, in powers of ten above 0.
    """
    exact, halt = solved["exact"], solved["halt"]
    total, steps = exact.shape
    stops = halt > 0
    stops[:, -1] = True
    stop = stops.argmax(axis=1)
    low, high = wilson_interval(int(exact[:, -1].sum()), total)
    found = {
        "exact_accuracy": exact[:, -1].mean(),
        "exact_accuracy_low": low,
        "exact_accuracy_high": high,
        "cell_accuracy": solved["cells"].mean(),
        "q_accuracy": ((halt[:, -1] >= 0) == exact[:, -1]).mean(),
        "lm_loss": solved["nats"].mean(),
        "halt_steps": stop.mean() + 1,
        "exact_at_halt": exact[np.arange(total), stop].mean(),
        "puzzles": total,
    }
    found = {f"eval_{name}": value for name, value in found.items()}
    found |= {f"exact_by_step/{i + 1}": exact[:, i].mean() for i in range(steps)}
    for first, last in [(0, 0), *((10**i, 10 ** (i + 1) - 1) for i in range(9))]:
        chosen = (ratings >= first) & (ratings <= last)
        if chosen.any():
            name = f"{first}_to_{last}" if last else "0"
            found[f"exact_by_rating/{name}"] = exact[chosen, -1].mean()
    return {name: float(value) for name, value in found.items()}


def board(dataset: Any, inputs: np.ndarray, labels: np.ndarray, answers: np.ndarray) -> dict[str, Any]:
    """Return a puzzle, its solution, and the answer after each step ([steps, cells]), a character per cell.

    `?` is a cell that does not count, or a token without a symbol. Steps that change nothing are left out.
    """
    symbols = "?.123456789" if dataset.kind == "sudoku" else "?#.SGo"

    def text(cells: np.ndarray) -> str:
        return "".join(symbols[cell] if cell < len(symbols) else "?" for cell in cells.tolist())

    changed = [i for i, answer in enumerate(answers) if i == 0 or (answer != answers[i - 1]).any()]
    steps = {str(i + 1): text(answers[i]) for i in changed}
    head = {"kind": dataset.kind, "width": dataset.width}
    return {**head, "puzzle": text(inputs), "solution": text(labels), "steps": steps}


def board_transcript(board: dict[str, Any]) -> Transcript:
    """Return what transcripts say of a board; reward 1 if it is solved."""

    def grid(cells: str) -> str:
        return "\n".join(cells[i : i + board["width"]] for i in range(0, len(cells), board["width"]))

    wrong = {
        step: sum(a != b and b != "?" for a, b in zip(cells, board["solution"], strict=True))
        for step, cells in board["steps"].items()
    }
    said = [f"after step {step}: {f'{count} wrong' if count else 'solved'}" for step, count in wrong.items()]
    last = "\n".join([*said, "", grid([*board["steps"].values()][-1])])
    solved = float([*wrong.values()][-1] == 0)
    return Transcript(grid(board["puzzle"]), grid(board["solution"]), last, None, solved, board)


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

"""Metrics of solved puzzles, and the boards that people look at."""

from typing import Any

import numpy as np

from trainer.evaluation.statistics import wilson_interval
from trainer.telemetry.transcripts import Transcript


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

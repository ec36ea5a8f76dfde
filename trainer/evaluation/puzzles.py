"""Metrics of solved puzzles, and the boards that people look at."""

from typing import Any

import numpy as np

from trainer.evaluation.statistics import wilson_interval


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


def board_text(cells: np.ndarray, width: int, kind: str, labels: np.ndarray | None = None) -> str:
    """Return a puzzle as lines of text. With labels, a cell that differs from its label is in brackets."""
    symbols = "?.123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ" if kind == "sudoku" else "?#.SGo"
    shown = []
    for i, cell in enumerate(cells.tolist()):
        symbol = symbols[cell] if cell < len(symbols) else str(cell)
        wrong = labels is not None and labels[i] not in (0, cell)
        shown.append(f"[{symbol}]" if wrong else f" {symbol} ")
    return "\n".join("".join(shown[start : start + width]).rstrip() for start in range(0, len(shown), width))


def solution_text(dataset: Any, inputs: np.ndarray, labels: np.ndarray, answers: np.ndarray) -> str:
    """Return a puzzle and the answer after each step, [steps, cells]; steps that change nothing are left out."""
    parts = ["puzzle\n" + board_text(inputs, dataset.width, dataset.kind)]
    for step, answer in enumerate(answers):
        if step == 0 or (answer != answers[step - 1]).any():
            wrong = int(((answer != labels) & (labels != 0)).sum())
            said = "solved" if not wrong else f"{wrong} cell{'s' if wrong > 1 else ''} wrong, in brackets"
            board = board_text(answer, dataset.width, dataset.kind, labels)
            parts.append(f"after step {step + 1}: {said}\n{board}")
    return "\n\n".join(parts)

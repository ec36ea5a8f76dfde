"""Evaluations: how long the answers are; how well the model counts; how many puzzles it solves."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any


def style(answers: Sequence[Any]) -> dict[str, float]:
    """Return metrics of the answers, each with `prompt`, `response`, `answer` and `correct`."""
    lengths = [len(item.response) for item in answers]
    return {"characters": fmean(lengths), "empty": fmean(length == 0 for length in lengths)}


def counting(model: Any, *, upto: int = 20) -> dict[str, list[bool]]:
    """Return for each number whether the model prefers its successor to the number itself."""
    starts = model.encode([f"{i} " for i in range(upto)])
    right, wrong = (model.encode([f"{i + more} " for i in range(upto)]) for more in (1, 0))
    rows = [[*model.bos, *start, *end] for ends in (right, wrong) for start, end in zip(starts, ends, strict=True)]
    ends = [
        float(logprobs[-len(end) :].mean()) for end, (logprobs, _) in zip(right + wrong, model.score(rows), strict=True)
    ]
    return {"successor": [good > bad for good, bad in zip(ends[:upto], ends[upto:], strict=True)]}


def solved(model: Any, *, puzzles: int = 50) -> dict[str, list[bool]]:
    """Return which of the first test puzzles a model of the puzzle loop solves; a label of 0 does not count."""
    (batch,) = model.dataset.test_batches(puzzles, puzzles)
    found = model.solve(batch.inputs[: batch.size])
    labels = batch.labels[: batch.size]
    return {"exact": ((found == labels) | (labels == 0)).all(axis=1).tolist()}

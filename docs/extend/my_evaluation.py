"""Evaluation: how long the answers are, and how many say nothing."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any


def style(answers: Sequence[Any]) -> dict[str, float]:
    """Return metrics of the answers, each with `prompt`, `response`, `answer` and `correct`."""
    lengths = [len(item.response) for item in answers]
    return {"characters": fmean(lengths), "empty": fmean(length == 0 for length in lengths)}

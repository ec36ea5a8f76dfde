"""Learning curves across runs: for each metric and setting the mean over its seeds, the lowest and the highest."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from controller.report.gather import RESULT_FILE, Metric
from controller.report.settings import Setting

PREFERRED_METRICS = (
    ("eval", "eval_accuracy"), ("test", "test_accuracy"), ("eval", "eval_loss"), ("", "accuracy"), ("", "loss"),
    ("", "reward_mean"),
)  # fmt: skip
"""What is looked at first, where a run has it; the phase of the last ones is any."""
MAX_METRICS = 100
MAX_POINTS, MIN_POINTS = 200, 20
MAX_VALUES = 200_000
"""Of all curves together: about 1.5 MB."""


@dataclass(frozen=True)
class Curve:
    """By step; None where no run has a finite number."""

    steps: tuple[float, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


def select_metrics(settings: Sequence[Setting], wanted: str = "") -> tuple[list[Metric], int]:
    """The metrics of the runs, those first that are looked at first, and how many more there are.

    Left out are first those that the fewest runs have.

    Args:
        wanted: the name of one that is above all others.
    """
    found = Counter(metric for setting in settings for run in setting.counted for metric in run.curves)

    def rank(metric: Metric) -> int:
        phase, name = metric
        like = [
            i for i, (p, n) in enumerate(PREFERRED_METRICS) if n == name and p in ("", phase) and phase != RESULT_FILE
        ]
        return -1 if name == wanted else min(like, default=len(PREFERRED_METRICS)) + (phase == RESULT_FILE)

    most = min(MAX_METRICS, max(1, MAX_VALUES // (3 * MIN_POINTS * max(1, len(settings)))))
    kept = sorted(found, key=lambda metric: (rank(metric), -found[metric], metric))[:most]
    return sorted(kept, key=lambda metric: (rank(metric), metric)), len(found) - len(kept)


def points_per_curve(metrics: Sequence[Metric], settings: Sequence[Setting]) -> int:
    """How many points a curve may have, that all together stay small."""
    share = MAX_VALUES // (3 * max(1, len(metrics)) * max(1, len(settings)))
    return min(MAX_POINTS, max(MIN_POINTS, share))


def build_curve(setting: Setting, metric: Metric, points: int = MAX_POINTS) -> Curve | None:
    """The curve of one setting, thinned to every k-th step, the last one included; None where it has none.

    It is over the steps that all runs have told. Runs that told other steps than each other, as after warm starts of
    different lengths, are joined by straight lines over the steps that all of them span.
    """
    known = [run.curves[metric] for run in setting.counted if metric in run.curves]
    if not known or metric[0] == RESULT_FILE:
        return None
    shared, every = set.intersection(*map(set, known)), set.union(*map(set, known))
    if 2 * len(shared) < min(map(len, known)):
        first, last = max(map(min, known)), min(map(max, known))
        known = [_interpolate(one, every) for one in known]
        shared = {step for step in every if first <= step <= last}
    steps = _downsample(sorted(shared or every), points)
    values = [[value for one in known if (value := one.get(step)) is not None] for step in steps]
    mean = tuple(statistics.fmean(found) if found else None for found in values)
    low, high = ([edge(found) if found else None for found in values] for edge in (min, max))
    return Curve(tuple(steps), mean, tuple(low), tuple(high))


def _interpolate(told: Mapping[float, float | None], steps: Iterable[float]) -> dict[float, float | None]:
    """What one run has told, and between that straight lines; of steps before and after it, nothing."""
    import numpy as np

    there = sorted(step for step, value in told.items() if value is not None)
    if not there:
        return {}
    within = [step for step in steps if there[0] <= step <= there[-1]]
    values = np.interp(within, there, np.array([told[step] for step in there], float))
    joined = dict(zip(within, map(float, values), strict=True))
    return joined | {step: None for step, value in told.items() if value is None}


def _downsample(steps: Sequence[float], points: int) -> list[float]:
    every = -(-len(steps) // points) if points else 1
    return [step for i, step in enumerate(reversed(steps)) if i % max(1, every) == 0][::-1]


def round_values(values: Iterable[float | None]) -> list[float | None]:
    """Five digits, which is more than a screen shows."""
    return [None if value is None else float(f"{value:.5g}") for value in values]

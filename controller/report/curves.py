"""The metrics of a report in the order of the page, and the curve of each: mean and band over a setting's runs."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from controller.core.errors import ConfigError
from controller.core.text import nearest_names
from controller.report.comparison import Setting
from controller.report.gather import RESULT_FILE, Metric, RecordedRun

PREFERRED_METRICS = (
    ("eval", "eval_accuracy"), ("eval", "eval_exact_accuracy"),
    ("test", "test_accuracy"), ("eval", "eval_loss"), ("", "accuracy"), ("", "loss"),
    ("", "reward_mean"),
)  # fmt: skip
"""Metrics that come first, if a run has them; an empty phase matches any."""
MAX_METRICS = 100
MAX_POINTS, MIN_POINTS = 120, 20
MAX_VALUES = 100_000
"""Limit for the values of all curves together, about 1 MB."""
MAX_DRAWABLE = 1e100
"""Larger values cannot be drawn on an axis."""


@dataclass(frozen=True)
class Curve:
    """Values of one setting by step: mean, lowest and highest over its runs. told: the mean before it was smoothed."""

    steps: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    told: tuple[float, ...] = ()


def select_metrics(
    settings: Sequence[Setting], wanted: str = "", patterns: Sequence[str] = ()
) -> tuple[list[Metric], int]:
    """Return the metrics in the order of the page, and how many others were left out.

    Those that the fewest runs have are left out, and those that match none of the `patterns`, if there are any; the
    bounds of an interval have no place of their own. `wanted` names a metric that comes before all others. Raises
    ConfigError if no metric matches a pattern.
    """
    every = Counter(metric for setting in settings for run in setting.counted_runs for metric in run.curves)
    counts = {metric: count for metric, count in every.items() if not is_bound(metric, every)}
    for pattern in patterns:
        if not any(_matches(metric, pattern) for metric in counts):
            near = nearest_names(pattern, {name for _, name in counts})
            raise ConfigError(
                f"--metric {pattern}: no metric matches; {f'closest: {near}' if near else 'the runs have none'}"
            )

    def rank(metric: Metric) -> int:
        return -1 if metric[1] == wanted else _preference(metric)

    limit = min(MAX_METRICS, max(1, MAX_VALUES // (3 * MIN_POINTS * max(1, len(settings)))))
    sought = [metric for metric in counts if not patterns or any(_matches(metric, each) for each in patterns)]
    kept = sorted(sought, key=lambda metric: (rank(metric), -counts[metric], metric))[:limit]
    return sorted(kept, key=lambda metric: (rank(metric), *map(_natural, metric))), len(counts) - len(kept)


def _matches(metric: Metric, pattern: str) -> bool:
    return fnmatchcase(metric[1], pattern) or fnmatchcase(f"{metric[0]}: {metric[1]}", pattern)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which layer_2 comes before layer_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def is_preferred(metric: Metric) -> bool:
    """Return whether the metric is one of PREFERRED_METRICS."""
    return _preference(metric) < len(PREFERRED_METRICS)


def _preference(metric: Metric) -> int:
    """Return the place in PREFERRED_METRICS; results of summary.json come after all others."""
    phase, name = metric
    if phase == RESULT_FILE:
        return len(PREFERRED_METRICS) + 1
    like = (i for i, (p, n) in enumerate(PREFERRED_METRICS) if n == name and p in ("", phase))
    return min(like, default=len(PREFERRED_METRICS))


def points_per_curve(metrics: Sequence[Metric], settings: Sequence[Setting]) -> int:
    """Return how many points a curve may have, so that all of them together stay small."""
    share = MAX_VALUES // (3 * max(1, len(metrics)) * max(1, len(settings)))
    return min(MAX_POINTS, max(MIN_POINTS, share))


def build_curve(setting: Setting, metric: Metric, points: int = MAX_POINTS) -> Curve | None:
    """Return the curve of one setting over the steps that all its runs span, or None if there is none to draw.

    Between the steps that a run has logged, its values lie on straight lines: warm starts of different lengths give
    the runs of one setting different steps. If all have finished, each counts with its last value from there on, so
    that the curve ends where the table does. Of a single run, the band is the interval that it told. A run whose last
    values are not finite is not counted there. Long curves keep every k-th step and the last one.
    """
    logged = [run.curves[metric] for run in setting.counted_runs if metric in run.curves]
    finite = [sorted((step, value) for step, value in one.items() if value is not None) for one in logged]
    if not any(finite) or metric[0] == RESULT_FILE:
        return None
    ends = [run.state == "finished" for run in setting.counted_runs if metric in run.curves]
    first, last = max(map(min, logged)), (max if all(ends) else min)(map(max, logged))
    steps = np.array(sorted({step for one in logged for step in one if first <= step <= last}))
    steps = steps[::-1][:: max(1, -(-len(steps) // points))][::-1]
    goes_on = [all(ends) and one[max(one)] is not None for one in logged]
    values = np.array(
        [
            np.interp(steps, *np.array(one, float).T, left=np.nan, right=one[-1][1] if has_end else np.nan)
            for one, has_end in zip(finite, goes_on, strict=True)
            if one
        ]
    )
    known = ~np.isnan(values).all(axis=0)
    steps, values = steps[known], values[:, known]
    if not values.size or np.nanmax(np.abs(values)) > MAX_DRAWABLE:
        return None
    low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    if len(logged) == 1:
        low, high = (_bound(setting.counted_runs, metric, end, steps, at) for end, at in (("low", low), ("high", high)))
    return Curve(*(tuple(row.tolist()) for row in (steps, np.nanmean(values, axis=0), low, high)))


def smooth(curve: Curve, weight: float) -> Curve:
    """Return the curve with a moving average as its mean: `weight` (0 to below 1) of it is what came before.

    As in TensorBoard, the first values are not drawn to zero. The curve itself for a weight of 0.
    """
    if not weight:
        return curve
    values, past, mass = list[float](), 0.0, 0.0
    for value in curve.mean:
        past, mass = weight * past + (1 - weight) * value, weight * mass + 1 - weight
        values.append(past / mass)
    return replace(curve, mean=tuple(values), told=curve.mean)


def _bound(runs: Sequence[RecordedRun], metric: Metric, end: str, steps: Any, otherwise: Any) -> Any:
    """Return the bound of the interval that the only run told for a metric; the curve itself if it told none."""
    [told] = [run.curves.get((metric[0], f"{metric[1]}_{end}"), {}) for run in runs if metric in run.curves]
    known = sorted((step, value) for step, value in told.items() if value is not None)
    return np.interp(steps, *np.array(known, float).T) if known else otherwise


def is_bound(metric: Metric, known: Collection[Metric]) -> bool:
    """Return whether a metric is a bound of another one's interval, as whose band it is drawn."""
    base, _, end = metric[1].rpartition("_")
    return end in ("low", "high") and {(metric[0], each) for each in (base, f"{base}_low", f"{base}_high")} <= {*known}

"""Learning curves across runs: the mean, lowest and highest value over the seeds, per metric and setting."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from controller.report.gather import RESULT_FILE, Metric
from controller.report.settings import Setting

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
    """Values of one setting by step: mean, lowest and highest over its runs."""

    steps: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def select_metrics(settings: Sequence[Setting], wanted: str = "") -> tuple[list[Metric], int]:
    """Return the metrics in the order of the page, and how many others were left out.

    Those that the fewest runs have are left out. `wanted` names a metric that comes before all others.
    """
    counts = Counter(metric for setting in settings for run in setting.counted_runs for metric in run.curves)

    def rank(metric: Metric) -> int:
        return -1 if metric[1] == wanted else _preference(metric)

    limit = min(MAX_METRICS, max(1, MAX_VALUES // (3 * MIN_POINTS * max(1, len(settings)))))
    kept = sorted(counts, key=lambda metric: (rank(metric), -counts[metric], metric))[:limit]
    return sorted(kept, key=lambda metric: (rank(metric), metric)), len(counts) - len(kept)


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
    the runs of one setting different steps. A run whose last values are not finite is not counted there. Long curves
    keep every k-th step and the last one.
    """
    import numpy as np

    logged = [run.curves[metric] for run in setting.counted_runs if metric in run.curves]
    finite = [sorted((step, value) for step, value in one.items() if value is not None) for one in logged]
    if not any(finite) or metric[0] == RESULT_FILE:
        return None
    first, last = max(map(min, logged)), min(map(max, logged))
    steps = np.array(sorted({step for one in logged for step in one if first <= step <= last}))
    steps = steps[::-1][:: max(1, -(-len(steps) // points))][::-1]
    outside = {"left": np.nan, "right": np.nan}
    values = np.array([np.interp(steps, *np.array(one, float).T, **outside) for one in finite if one])
    known = ~np.isnan(values).all(axis=0)
    values = values[:, known]
    if not values.size or np.nanmax(np.abs(values)) > MAX_DRAWABLE:
        return None
    rows = (steps[known], np.nanmean(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0))
    return Curve(*(tuple(row.tolist()) for row in rows))

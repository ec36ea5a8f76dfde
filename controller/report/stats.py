"""Confidence intervals for differences between settings: Student's t for pairs with the same seed, else Welch's t.

Welch, B. L. (1947), Biometrika 34, 28-35. On tests for few seeds: Colas, Sigaud, Oudeyer (2019), A Hitchhiker's
Guide to Statistical Comparisons of Reinforcement Learning Algorithms, https://arxiv.org/abs/1904.06979.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Comparison:
    """One setting compared with the baseline. `n`: runs with a number; `pairs`: seeds that both have.

    Undefined values are None: the spread of one run, the interval of one pair or of identical differences.
    """

    n: int
    mean: float | None
    deviation: float | None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    how: str = ""
    pairs: int = 0

    @property
    def is_significant(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def summarize(values: Mapping[Any, float]) -> Comparison:
    """Summarize a setting by itself; values are by seed."""
    found = list(values.values())
    deviation = statistics.stdev(found) if len(found) > 1 else None
    return Comparison(len(found), statistics.fmean(found) if found else None, deviation)


def compare(values: Mapping[Any, float], baseline: Mapping[Any, float], comparisons: int = 1) -> Comparison:
    """Compare a setting with the baseline: paired by seed where at least two seeds are in both, else unpaired.

    Args:
        values: by seed.
        baseline: by seed.
        comparisons: how many intervals shall hold together; each is widened for it (Bonferroni).
    """
    from scipy import stats  # this import takes half a second

    one, confidence = summarize(values), 1 - (1 - CONFIDENCE) / comparisons
    seeds = [seed for seed in values if seed in baseline]
    if not values or not baseline:
        return one
    if len(seeds) > 1:
        differences = [values[seed] - baseline[seed] for seed in seeds]
        mean, how, bounds = statistics.fmean(differences), "paired", ()
        if len(set(differences)) > 1:
            bounds = stats.t.interval(confidence, len(seeds) - 1, mean, stats.sem(differences))
    else:
        a, b = list(values.values()), list(baseline.values())
        mean, how, bounds = statistics.fmean(a) - statistics.fmean(b), "too few seeds", ()
        if min(len(a), len(b)) > 1:
            how, parts = "Welch", [statistics.variance(sample) / len(sample) for sample in (a, b)]
            if any(parts):
                freedom = sum(parts) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(parts, (a, b), strict=True))
                bounds = stats.t.interval(confidence, freedom, mean, sum(parts) ** 0.5)
    low, high = (float(bound) for bound in bounds) if bounds else (None, None)
    return Comparison(one.n, one.mean, one.deviation, mean, low, high, how, len(seeds))

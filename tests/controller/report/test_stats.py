"""Intervals of differences between settings, against the published formulas."""

from __future__ import annotations

import statistics

import pytest
import scipy

from controller.report.stats import Comparison, compare, summarize


def test_paired_where_seeds_are_shared_else_two_samples() -> None:
    a, b = {0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.5, 1: 1.9, 2: 3.0}
    one = compare(a, b)
    expected = scipy.stats.ttest_rel([*a.values()], [*b.values()]).confidence_interval(0.95)
    assert (one.low, one.high) == pytest.approx((expected.low, expected.high))
    some = compare(a, {1: 1.0, 2: 1.0})
    assert (some.how, some.pairs, some.difference, some.n) == ("paired", 2, 2.0, 3)


def test_what_cannot_be_told_is_not() -> None:
    same = compare({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.5})
    assert (same.difference, same.low, same.is_significant) == (0.5, None, False)
    assert compare({}, {0: 1.0}).difference is None
    assert compare({0: 1.0, 1: 1.0}, {2: 1.0, 3: 1.0}).low is None
    assert (summarize({}).mean, summarize({0: 3.0}).deviation) == (None, None)


@pytest.mark.parametrize(
    ("a", "b"), [([1.0, 2.0, 4.0], [0.5, 1.9, 3.0]), ([1.0, 2.0, 4.0, 4.5], [3.0, 3.0]), ([7.0, 7.0], [1.0, 2.0, 9.0])]
)
def test_welch(a: list[float], b: list[float]) -> None:
    """Degrees of freedom by Welch and Satterthwaite; one of the samples may be constant, which SciPy warns of."""
    found = compare(dict(enumerate(a)), {100 + i: value for i, value in enumerate(b)})
    if min(statistics.variance(a), statistics.variance(b)) > 0:
        bounds = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((bounds.low, bounds.high))
    parts = [statistics.variance(sample) / len(sample) for sample in (a, b)]
    freedom = sum(parts) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(parts, (a, b), strict=True))
    half = scipy.stats.t.ppf(0.975, freedom) * sum(parts) ** 0.5
    mean = statistics.mean(a) - statistics.mean(b)
    assert (found.how, found.pairs, found.n) == ("Welch", 0, len(a))
    assert (found.difference, found.low, found.high) == pytest.approx((mean, mean - half, mean + half))


def test_one_run_on_either_side_has_a_difference_and_no_interval() -> None:
    for a, b in (({0: 1.0}, {0: 0.5}), ({0: 1.0}, {1: 0.25, 2: 0.75}), ({0: 0.0, 1: 2.0}, {2: 0.5})):
        found = compare(a, b)
        assert (found.how, found.difference, found.low, found.is_significant) == ("too few seeds", 0.5, None, False)


def test_the_spread_is_that_of_a_sample() -> None:
    found = compare({0: 1.0, 1: 2.0}, {})
    assert (found.n, found.mean, found.deviation, found.how) == (2, 1.5, pytest.approx(0.5**0.5), "")


@pytest.mark.parametrize(
    ("low", "high", "significant"),
    [(0.1, 0.5, True), (-0.5, -0.1, True), (0.0, 0.5, False), (-0.5, 0.0, False)],
)
def test_a_difference_is_significant_if_its_interval_excludes_zero(low: float, high: float, significant: bool) -> None:
    assert Comparison(3, 1.0, 0.1, 0.3, low, high).is_significant is significant

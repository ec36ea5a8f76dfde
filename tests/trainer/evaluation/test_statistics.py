"""Estimators against what enumeration says, intervals against published values and by simulation of all outcomes."""

import itertools
import math

import pytest

from trainer.evaluation import statistics


@pytest.mark.parametrize(("right", "total", "low", "high"), [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)])
def test_wilsons_interval_is_that_of_newcombes_table(right, total, low, high) -> None:
    """Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3."""
    assert statistics.wilson_interval(right, total) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("right", "total", "low", "high"), [(0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)])
def test_it_holds_at_the_edge(right, total, low, high) -> None:
    assert statistics.wilson_interval(right, total) == pytest.approx((low, high), abs=1e-4)
    mirrored = statistics.wilson_interval(total - right, total)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-4)


def test_the_intervals_share_of_hits_is_about_95_percent() -> None:
    """Over all outcomes of 40 answers, weighed by their probability."""
    for share in (0.1, 0.3, 0.5, 0.8):
        hits = 0.0
        for right in range(41):
            low, high = statistics.wilson_interval(right, 40)
            if low <= share <= high:
                hits += math.comb(40, right) * share**right * (1 - share) ** (40 - right)
        assert 0.92 < hits < 0.98


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 6])
def test_pass_at_k_is_the_mean_over_all_choices(samples) -> None:
    for right in range(samples + 1):
        outcomes = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            chosen = [any(choice) for choice in itertools.combinations(outcomes, k)]
            assert statistics.pass_at_k(samples, right, k) == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


def test_pass_at_k_has_no_bias() -> None:
    """Its expectation over 5 answers that are right with probability p is that one of k such is."""
    for p, k in itertools.product((0.1, 0.5, 0.9), range(1, 6)):
        expected = sum(math.comb(5, c) * p**c * (1 - p) ** (5 - c) * statistics.pass_at_k(5, c, k) for c in range(6))
        assert expected == pytest.approx(1 - (1 - p) ** k)


def test_majority_is_the_mean_over_all_tosses() -> None:
    """Of every way in which four samples can answer."""
    for answers in itertools.product(("7", "8", "9", None), repeat=4):
        right = [answer == "7" for answer in answers]
        said = [answer for answer in answers if answer is not None]
        most = max((said.count(answer) for answer in said), default=0)
        tossed = sorted({answer for answer in said if said.count(answer) == most})
        expected = tossed.count("7") / len(tossed) if tossed else 0.0
        assert statistics.majority_vote(answers, right) == pytest.approx(expected)


def test_samples_of_a_question_are_no_independent_evidence() -> None:
    same, low = [1.0, 0.0] * 20, 0.5 - statistics.Z_95 * math.sqrt(0.25 / 39)
    assert statistics.clustered_interval(same) == pytest.approx((low, 1 - low))
    assert statistics.clustered_interval([0.5] * 40) == (0.5, 0.5)
    assert statistics.clustered_interval([0.3]) == (0.0, 1.0)


@pytest.mark.parametrize(("samples", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_ks(samples, expected) -> None:
    assert statistics.pass_k_values(samples) == expected

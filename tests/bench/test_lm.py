"""What the LM bench says of its rounds, how it knows that the cores are idle, and the time to an accuracy."""

import math

import pytest

from tests.bench import learning, lm

STAT = """cpu  30 0 30 900 40 0 0 0 0 0
cpu0 10 0 10 450 30 0 0 0 0 0
cpu1 20 0 20 450 10 0 0 0 0 0
intr 5
"""


def test_the_interval_of_a_ratio_is_that_of_its_logarithm():
    mean, low, high = lm.ratio([2.0, 4.0, 8.0], [1.0, 1.0, 1.0])
    assert mean == pytest.approx(4)
    half = 4.302653 * math.log(2) / 3**0.5  # Student's t with two degrees of freedom
    assert (low, high) == (pytest.approx(4 * math.exp(-half)), pytest.approx(4 * math.exp(half)))


def test_one_round_has_no_interval():
    assert lm.ratio([3.0], [2.0]) == (pytest.approx(1.5), 0.0, math.inf)


def test_ratios_are_of_pairs():
    rounds = [{"tokens/s": 10.0 * k, "nanoGPT tokens/s": 8.0 * k} for k in (1, 3, 2)]
    assert lm.table(rounds)[-1] == "tokens/s, of nanoGPT's: 1.250 (95 %: 1.250 to 1.250)"


def test_idle_time_is_that_of_the_cores_in_use():
    assert lm.core_times(STAT, "0") == (480, 500)
    assert lm.core_times(STAT, "0,1") == (940, 1000)


def test_a_busy_machine_is_refused(monkeypatch):
    monkeypatch.setattr(lm, "busy_share", lambda cores, seconds: 0.4)
    monkeypatch.setattr(lm, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(lm.BusyError, match=r"cores 0,1 are 40% busy; end what runs there, or measure with --loaded"):
        lm.wait_until_idle("0,1")


def test_the_time_to_an_accuracy_ends_with_the_evaluation_that_finds_it():
    lines = [
        {"phase": "warm_start", "time": 1.0, "eval_accuracy": 0.99},
        *(
            {"phase": "eval", "time": at, "eval_accuracy": found}
            for at, found in ((5.0, 0.94), (7.0, 0.95), (9.0, 0.99))
        ),
    ]
    assert learning.seconds_to_level(lines, 2.0) == 5.0
    assert learning.seconds_to_level(lines[:2], 2.0) is None

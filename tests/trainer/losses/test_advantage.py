"""Advantages, penalties and weights of samples, by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.losses.test_references import loop
from trainer.losses import advantage


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("population", [1, -1, -1, 1]),  # deviation 1/2
        ("sample", [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5]),  # deviation 1/sqrt(3)
        ("none", [0.5, -0.5, -0.5, 0.5]),
    ],
)
def test_advantages_over_the_groups_mean(std, expected):
    rewards = np.array([[1, 0, 0, 1], [3, 3, 3, 3], [10, 8, 8, 10]], np.float32)
    found = advantage.advantages(rewards, std)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(found[1], 0)  # all equal: nothing to learn
    np.testing.assert_allclose(found[2], np.array(expected) * (2 if std == "none" else 1), rtol=1e-5)


def test_advantages_over_the_mean_of_the_others():
    found = advantage.advantages(np.array([[4, 1, 1], [2, 2, 2], [0, 6, 3]], np.float32), "none", leave_one_out=True)
    np.testing.assert_allclose(found, [[3, -1.5, -1.5], [0, 0, 0], [-4.5, 4.5, 0]], rtol=1e-6)


ESTIMATORS = [("population", False), ("sample", False), ("none", False), ("none", True)]


@pytest.mark.parametrize(("std", "leave_one_out"), ESTIMATORS)
@settings(derandomize=True, database=None, deadline=None)
@given(st.floats(-1e6, 1e6) | st.decimals(-20, 20, places=1).map(float), st.integers(2, 64), st.booleans())
def test_equal_rewards_have_advantages_of_exactly_0(std, leave_one_out, value, samples, wide):
    """Of every value, in groups of every size. In float32 the mean of six rewards of 1.3 is not 1.3."""
    summed = np.array([[0.1 + 0.2, 0.3, 0.3, 0.3, 0.3, 0.3]])  # in another order
    for rewards in (np.full((1, samples), value, np.float64 if wide else np.float32), summed):
        assert advantage.has_equal_rewards(rewards).all()
        assert not advantage.advantages(rewards, std, leave_one_out).any()


@pytest.mark.parametrize("std", ["population", "sample"])
def test_almost_equal_rewards_do_not_explode(std):
    rewards = np.array([[1, 1, 1, 1 + 2**-20]], np.float32)
    assert np.abs(advantage.advantages(rewards, std)).max() < 1


def test_the_penalty_grows_over_the_end_of_the_longest_response():
    penalize = loop(overlong="penalize", overlong_buffer_fraction=0.2, max_new_tokens=100)
    found = advantage.overlong_penalty(np.array([1, 79, 80, 85, 90, 100]), penalize)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [0, 0, 0, -0.25, -0.5, -1], atol=1e-6)
    for overlong in ("keep", "drop"):
        assert not advantage.overlong_penalty(np.array([1, 100]), loop(overlong=overlong)).any()


def test_weights_say_what_is_left_out_and_why():
    equal, cut = np.array([1, 1, 0, 0], np.float32), np.array([0, 1, 1, 0], np.float32)
    kept = advantage.sample_weights(equal, cut, loop())
    assert kept["weight"].tolist() == [1, 1, 1, 1]
    assert not kept["filtered_equal"].any()
    assert not kept["filtered_overlong"].any()
    left_out = advantage.sample_weights(equal, cut, loop(filter_zero_variance_groups=True, overlong="drop"))
    assert left_out["weight"].tolist() == [0, 0, 0, 1]
    assert left_out["filtered_equal"].tolist() == [1, 1, 0, 0]
    assert left_out["filtered_overlong"].tolist() == [0, 1, 1, 0]

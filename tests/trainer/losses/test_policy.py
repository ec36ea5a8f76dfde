"""Every loss that TRL's fixture lacks against its formula, written out token by token in NumPy."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema.training.loop import GRPO_LOSSES, GrpoLoop
from tests.groups import load_group
from tests.paths import ROOT
from tests.trainer.losses.test_references import GIVEN, NOW, check_against, loop
from trainer import extension
from trainer.losses import policy

ROWS = range(len(NOW))
ADVANTAGE = GIVEN["advantage"]
NO_CLIP = {"clip_ratio_low": None, "clip_ratio_high": None}
TEACHER = load_group("model/tiny") | {"weights": "/teacher"}


def tokens_of(row: int) -> range:
    return range(int(GIVEN["mask"][row].sum()))


def mean_over_tokens(term) -> float:
    terms = [term(row, t) for row in ROWS for t in tokens_of(row)]
    return sum(terms) / len(terms)


def ratio(now, row: int, t: int) -> float:
    return np.exp(now[row, t] - GIVEN["old"][row, t])


def cispo(now, weight_of=NOW) -> float:
    """weight_of: the ratio's log-probabilities, which are constants in the gradient."""

    def term(row: int, t: int) -> float:
        return -min(max(ratio(weight_of, row, t), 0.9), 1.3) * ADVANTAGE[row] * now[row, t]

    return mean_over_tokens(term)


def maxrl(now) -> float:
    """Algorithm 1, with the clipped ratio in place of the log-probability; the constant is the longest response."""

    def term(row: int, t: int) -> float:
        r = ratio(now, row, t)
        return -min(r * ADVANTAGE[row], min(max(r, 0.8), 1.2) * ADVANTAGE[row])

    return mean_over_tokens(term) * GIVEN["mask"].sum() / (len(NOW) * 9)


def distillation(now) -> float:
    return mean_over_tokens(lambda row, t: -ratio(now, row, t) * (GIVEN["reference"][row, t] - GIVEN["old"][row, t]))


def sft(now) -> float:
    return mean_over_tokens(lambda row, t: -now[row, t])


def dpo(now) -> float:
    def reward(row: int) -> float:
        return 0.3 * sum(now[row, t] - GIVEN["reference"][row, t] for t in tokens_of(row))

    return np.mean([np.log(1 + np.exp(reward(row + 1) - reward(row))) for row in ROWS[::2]])


def sapo(now) -> float:
    def term(row: int, t: int) -> float:
        tau = 1.0 if ADVANTAGE[row] > 0 else 2.0
        return -4 / tau / (1 + np.exp(-tau * (ratio(now, row, t) - 1))) * ADVANTAGE[row]

    return np.mean([np.mean([term(row, t) for t in tokens_of(row)]) for row in ROWS])


CASES = {
    "cispo": (cispo, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "kl_coef": 0.0}),
    "maxrl": (maxrl, {"advantage_std": "none", "kl_coef": 0.0}),
    "distillation": (distillation, {"kl_coef": 0.0, "teacher": TEACHER} | NO_CLIP),
    "sft": (sft, {"kl_coef": 0.0}),
    "dpo": (dpo, {"kl_coef": 0.3, "group_size": 2}),
    "my_policy_loss:Sapo": (sapo, {"kl_coef": 0.0, "loss_options": {"tau_neg": 2.0}}),
}


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    extension.add_modules(ROOT / "docs" / "extend")


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_equal_the_formula(name: str) -> None:
    formula, values = CASES[name]
    check_against(formula, loop(loss_type=name, **values))


def test_the_names_of_the_config_are_those_of_the_classes() -> None:
    assert tuple(policy.LOSSES) == GRPO_LOSSES


@pytest.mark.parametrize("name", [name for name in GRPO_LOSSES if name != "distillation"])
def test_every_loss_has_a_file_of_its_values(name: str) -> None:
    cfg = GrpoLoop(**load_group(f"loop/{name}"))
    assert type(policy.load_loss(cfg)) is policy.LOSSES[name]


def test_maxrl_divides_by_the_share_of_right_answers() -> None:
    cfg = GrpoLoop(**load_group("loop/maxrl"))
    rewards = np.array([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    expected = [[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0] * 4, [0] * 4]
    np.testing.assert_allclose(policy.load_loss(cfg).advantages(rewards), expected, rtol=1e-6)


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
    found = policy.advantages(rewards, std)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(found[1], 0)  # all equal: nothing to learn
    np.testing.assert_allclose(found[2], np.array(expected) * (2 if std == "none" else 1), rtol=1e-5)


def test_advantages_over_the_mean_of_the_others():
    found = policy.advantages(np.array([[4, 1, 1], [2, 2, 2], [0, 6, 3]], np.float32), "none", leave_one_out=True)
    np.testing.assert_allclose(found, [[3, -1.5, -1.5], [0, 0, 0], [-4.5, 4.5, 0]], rtol=1e-6)


ESTIMATORS = [("population", False), ("sample", False), ("none", False), ("none", True)]


@pytest.mark.parametrize(("std", "leave_one_out"), ESTIMATORS)
@settings(derandomize=True, database=None, deadline=None)
@given(st.floats(-1e6, 1e6) | st.decimals(-20, 20, places=1).map(float), st.integers(2, 64), st.booleans())
def test_equal_rewards_have_advantages_of_exactly_0(std, leave_one_out, value, samples, wide):
    """Of every value, in groups of every size. In float32 the mean of six rewards of 1.3 is not 1.3."""
    summed = np.array([[0.1 + 0.2, 0.3, 0.3, 0.3, 0.3, 0.3]])  # in another order
    for rewards in (np.full((1, samples), value, np.float64 if wide else np.float32), summed):
        assert policy.has_equal_rewards(rewards).all()
        assert not policy.advantages(rewards, std, leave_one_out).any()


@pytest.mark.parametrize("std", ["population", "sample"])
def test_almost_equal_rewards_do_not_explode(std):
    rewards = np.array([[1, 1, 1, 1 + 2**-20]], np.float32)
    assert np.abs(policy.advantages(rewards, std)).max() < 1


def test_the_penalty_grows_over_the_end_of_the_longest_response():
    penalize = loop(overlong="penalize", overlong_buffer_fraction=0.2, max_new_tokens=100)
    found = policy.overlong_penalty(np.array([1, 79, 80, 85, 90, 100]), penalize)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [0, 0, 0, -0.25, -0.5, -1], atol=1e-6)
    for overlong in ("keep", "drop"):
        assert not policy.overlong_penalty(np.array([1, 100]), loop(overlong=overlong)).any()


def test_weights_say_what_is_left_out_and_why():
    equal, cut = np.array([1, 1, 0, 0], np.float32), np.array([0, 1, 1, 0], np.float32)
    kept = policy.sample_weights(equal, cut, loop())
    assert kept["weight"].tolist() == [1, 1, 1, 1]
    assert not kept["filtered_equal"].any()
    assert not kept["filtered_overlong"].any()
    left_out = policy.sample_weights(equal, cut, loop(filter_zero_variance_groups=True, overlong="drop"))
    assert left_out["weight"].tolist() == [0, 0, 0, 1]
    assert left_out["filtered_equal"].tolist() == [1, 1, 0, 0]
    assert left_out["filtered_overlong"].tolist() == [0, 1, 1, 0]

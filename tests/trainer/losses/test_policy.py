"""Every loss that TRL's fixture lacks against its formula, written out token by token in NumPy."""

import sys

import numpy as np
import pytest

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

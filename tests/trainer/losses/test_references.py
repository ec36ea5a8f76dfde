"""Losses and gradients against TRL's on fixed log-probabilities; what TRL has not, against finite differences.

fixtures/losses.json is made by fixtures/make_losses.py.
"""

import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.loop import GrpoLoop
from tests.groups import load_group
from tests.paths import ROOT
from trainer.losses import grpo
from trainer.step import metric_sums

FIXTURE = json.loads((ROOT / "tests" / "trainer" / "fixtures" / "losses.json").read_text())
GIVEN = {name: np.array(value) for name, value in FIXTURE["given"].items()}
NOW, ENTROPY = GIVEN["now"], GIVEN["entropy"]


def loop(**values) -> GrpoLoop:
    return GrpoLoop(**load_group("loop/grpo") | {"max_new_tokens": FIXTURE["longest"]} | values)


def token_tis(threshold: float) -> dict[str, object]:
    weights = {"rollout_is": "token", "rollout_is_threshold": threshold}
    return weights | {"rollout_rs": None, "rollout_rs_threshold": None}


def batch(dtype=np.float32, weight=(1, 1, 1, 1, 1, 1)) -> dict[str, np.ndarray]:
    fields = {name: GIVEN[name].astype(dtype) for name in ("old", "sampler", "reference", "advantage", "mask")}
    return fields | {"weight": np.array(weight, dtype)}


def mean(cfg: GrpoLoop, logprob, entropy, fields) -> jax.Array:
    total, count = grpo.policy_loss_terms(logprob, entropy, fields, cfg)["loss"]
    return total / count


@pytest.mark.parametrize("name", FIXTURE["cases"])
def test_loss_and_gradient_equal_trls(name):
    case = FIXTURE["cases"][name]
    differentiate = jax.value_and_grad(mean, argnums=(1, 2))
    found, slopes = differentiate(loop(**case["loop"]), jnp.float32(NOW), jnp.float32(ENTROPY), batch())
    assert np.abs(case["slope"]).max() > 0.01
    np.testing.assert_allclose(found, case["loss"], atol=1e-6)
    np.testing.assert_allclose(slopes[0], case["slope"], atol=1e-6)
    np.testing.assert_allclose(slopes[1], case["entropy_slope"], atol=1e-6)


RLOO = {"loss_type": "rloo", "advantage_std": "none", "kl_coef": 0.3, "kl_estimator": "k2", "entropy_coef": 0.1}
DR_GRPO = {"loss_type": "dr_grpo", "advantage_std": "none", "entropy_coef": 0.1}
GSPO = {"loss_type": "gspo", "kl_coef": 0.3, "clip_ratio_low": 0.02, "clip_ratio_high": 0.03}
OTHERS = {
    "k1": {"kl_coef": 0.3, "kl_estimator": "k1", "clip_ratio_high": None},
    "k1 weighed": {"kl_coef": 0.3, "kl_estimator": "k1", "kl_unbiased": True, "clip_ratio_low": None},
    "entropy by sequence": {"entropy_coef": 0.1, "clip_ratio_low": None, "clip_ratio_high": None},
    "the sampler's, no cap": {"old_logprobs": "sampler"},
    "dr_grpo, entropy and importance": DR_GRPO | {"rollout_correction": token_tis(1.2)},
    "gspo, importance": GSPO | {"rollout_correction": token_tis(1.2)},
    "rloo, k2 and entropy": RLOO,
    "filtered": {"loss_type": "dapo", "clip_ratio_high": 0.28, "filter_zero_variance_groups": True, "kl_coef": 0.1},
}


def assert_slope(slope, value, at: np.ndarray) -> None:
    """Of a function of `at`, by finite differences; no ratio is within a step of a bound."""
    for row, t in np.ndindex(at.shape):
        moved = np.zeros(at.shape)
        moved[row, t] = 1e-6
        difference = (value(at + moved) - value(at - moved)) / 2e-6
        np.testing.assert_allclose(slope[row, t], difference, atol=1e-8, err_msg=f"{row}, {t}")


def check_against(formula: Callable[[np.ndarray], float], cfg: GrpoLoop) -> None:
    """Compare the loss that `cfg` names with `formula`, a function of the policy's log-probabilities [B, T]."""
    with jax.enable_x64(True):
        found, slope = jax.value_and_grad(mean, argnums=1)(cfg, NOW, ENTROPY, batch(np.float64))
    np.testing.assert_allclose(found, formula(NOW), atol=1e-9)
    np.testing.assert_allclose(mean(cfg, np.float32(NOW), np.float32(ENTROPY), batch()), formula(NOW), atol=1e-6)
    assert np.abs(slope).max() > 0.01
    assert_slope(slope, formula, NOW)


@pytest.mark.parametrize("name", OTHERS)
def test_the_gradient_equals_finite_differences(name):
    """In float64, of a batch with samples that are left out."""
    with jax.enable_x64(True):
        fields = batch(np.float64, weight=(1, 1, 0, 1, 1, 0))
        value = jax.jit(lambda logprob, entropy: mean(loop(**OTHERS[name]), logprob, entropy, fields))
        slopes = jax.grad(value, argnums=(0, 1))(NOW, ENTROPY)
        assert np.abs(slopes[0]).max() > 0.001
        assert_slope(slopes[0], lambda x: value(x, ENTROPY), NOW)
        assert_slope(slopes[1], lambda x: value(NOW, x), ENTROPY)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) + 0.5 - 1)])
def test_kl_estimators_by_hand(estimator, expected):
    """The policy gives the token a probability e^0.5 times the reference's."""
    cfg = loop(kl_coef=2.0, kl_estimator=estimator)
    one = {name: np.full((1, 1), -1.0, np.float32) for name in grpo.TOKEN_FIELDS}
    one |= {"mask": np.ones((1, 1), np.float32)}
    one |= {"advantage": np.zeros(1, np.float32), "weight": np.ones(1, np.float32)}
    one["reference"] -= 0.5
    found = grpo.policy_loss_terms(one["old"], one["mask"], one, cfg)
    np.testing.assert_allclose(found["kl"], [expected, 1], rtol=1e-6)
    np.testing.assert_allclose(found["loss"], [2 * expected, 1], rtol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "token_mean", "dr_grpo", "dapo", "gspo", "rloo"])
def test_samples_that_are_left_out_are_as_if_they_were_not_there(name):
    cfg = loop(**load_group(f"loop/{name}") | {"max_new_tokens": FIXTURE["longest"], "kl_coef": 0.2})
    kept = np.array([True, True, False, True, False, True])
    filtered = grpo.policy_loss_terms(NOW, ENTROPY, batch(weight=kept), cfg)
    fewer = grpo.policy_loss_terms(NOW[kept], ENTROPY[kept], {k: v[kept] for k, v in batch().items()}, cfg)
    for entry in ("loss", "clip_fraction", "ratio_mean", "ratio_min", "ratio_max"):
        np.testing.assert_allclose(filtered[entry], fewer[entry], rtol=1e-6, err_msg=entry)
    all_tokens = grpo.policy_loss_terms(NOW, ENTROPY, batch(), cfg)
    for entry in ("entropy", "kl", "sampler_trainer_logp_diff"):
        np.testing.assert_array_equal(filtered[entry], all_tokens[entry])


def test_on_policy_the_ratio_is_1_and_nothing_is_clipped():
    fields = batch() | {"old": np.float32(NOW), "sampler": np.float32(NOW), "reference": np.float32(NOW)}
    for name in ("grpo", "token_mean", "dr_grpo", "dapo", "gspo", "rloo"):
        cfg = loop(**load_group(f"loop/{name}") | {"kl_coef": 0.1})
        found = grpo.policy_loss_terms(np.float32(NOW), ENTROPY, fields, cfg)
        assert found["clip_fraction"][0] == found["kl"][0] == found["sampler_trainer_logp_diff"][0] == 0
        assert found["ratio_min"].value == found["ratio_max"].value == 1


def test_without_a_weight_of_the_kl_nobody_asks_for_the_reference():
    fields = {name: value for name, value in batch().items() if name != "reference"}
    found = grpo.policy_loss_terms(NOW, ENTROPY, fields, loop(kl_coef=0.0))
    assert "kl" not in found
    np.testing.assert_array_equal(
        found["loss"], grpo.policy_loss_terms(NOW, ENTROPY, batch(), loop(kl_coef=0.0))["loss"]
    )


def test_metrics_by_hand():
    found = metric_sums.finalize(grpo.policy_loss_terms(NOW, ENTROPY, batch(), loop()))
    mask = GIVEN["mask"] == 1
    ratio, apart = np.exp(NOW - GIVEN["old"])[mask], np.abs(GIVEN["old"] - GIVEN["sampler"])[mask]
    expected = {"ratio_min": ratio.min(), "ratio_max": ratio.max(), "ratio_mean": ratio.mean()}
    expected |= {"sampler_trainer_logp_diff": apart.mean(), "sampler_trainer_logp_diff_max": apart.max()}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)

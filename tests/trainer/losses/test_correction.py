"""Each correction against its formula, written out response by response in NumPy; names and bounds as in verl."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from conf.schema.training.loop_parts import RolloutCorrection
from tests.trainer.losses.test_references import ENTROPY, GIVEN, NOW, batch, check_against, loop
from trainer.losses import grpo
from trainer.losses.grpo import correct
from trainer.step import metric_sums

NONE = {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_rs": None, "rollout_rs_threshold": None}
LOG_RATIO = GIVEN["old"] - GIVEN["sampler"]
MASK = GIVEN["mask"] == 1
RESPONSES = [LOG_RATIO[row, MASK[row]] for row in range(len(LOG_RATIO))]
ESTIMATORS = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: np.exp(x) - 1 - x}
LEVELS = {"sum": np.sum, "mean": np.mean, "max": np.max}


def weights(cfg: RolloutCorrection) -> list[np.ndarray]:
    if cfg.rollout_is is None:
        return [np.ones(len(row)) for row in RESPONSES]
    if cfg.rollout_is == "token":
        return [np.array([min(np.exp(x), cfg.rollout_is_threshold) for x in row]) for row in RESPONSES]
    return [np.full(len(row), min(np.exp(row.sum()), cfg.rollout_is_threshold)) for row in RESPONSES]


def kept(cfg: RolloutCorrection, lower: float, upper: float) -> list[np.ndarray]:
    if cfg.rollout_rs is None:
        return [np.ones(len(row)) for row in RESPONSES]
    *level, kind = cfg.rollout_rs.split("_")
    found = []
    for row in RESPONSES:
        values = ESTIMATORS[kind](row)
        values = values if level == ["token"] else np.full(len(row), LEVELS[level[1]](values))
        found.append(((values >= lower) & (values <= upper)).astype(float))
    return found


def clipped(row: int, t: int, now) -> float:
    ratio, advantage = np.exp(now[row, t] - GIVEN["old"][row, t]), GIVEN["advantage"][row]
    return min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)


def written_out(cfg: RolloutCorrection, bounds: tuple[float, float], now) -> float:
    """The mean over responses that keep a token of the mean over their kept tokens."""
    by_row = []
    for row, (weight, keep) in enumerate(zip(weights(cfg), kept(cfg, *bounds), strict=True)):
        if keep.any():
            by_row.append(sum(-clipped(row, t, now) * weight[t] * keep[t] for t in range(len(keep))) / keep.sum())
    return float(np.mean(by_row))


CASES = {
    "none": ({}, (0, 0)),
    "token TIS": ({"rollout_is": "token", "rollout_is_threshold": 1.1}, (0, 0)),
    "sequence IS": ({"rollout_is": "sequence", "rollout_is_threshold": 1.2}, (0, 0)),
    "masked tokens": ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.3"}, np.log([0.8, 1.3])),
    "masked tokens, inverse bound": ({"rollout_rs": "token_k1", "rollout_rs_threshold": 1.25}, np.log([0.8, 1.25])),
    "masked tokens by k3": ({"rollout_rs": "token_k3", "rollout_rs_threshold": 0.05}, (-1, 0.05)),
    "masked responses": ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}, np.log([0.5, 2.0])),
    "geometric rejection": ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}, np.log([0.9, 1.1])),
    "k2 of the worst token": ({"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.08}, (-1, 0.08)),
}
CASES["both"] = (CASES["token TIS"][0] | CASES["geometric rejection"][0], np.log([0.9, 1.1]))


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_equal_the_formula_and_shares_are_told(name: str) -> None:
    values, bounds = CASES[name]
    cfg = loop(kl_coef=0.0, rollout_correction=NONE | values)
    check_against(partial(written_out, cfg.rollout_correction, bounds), cfg)

    cfg = cfg.rollout_correction
    found = metric_sums.finalize(correct(jnp.float32(LOG_RATIO), jnp.float32(GIVEN["mask"]), cfg).metrics)
    level = cfg if cfg.rollout_is else cfg.model_copy(update={"rollout_is": "token"})
    every = np.concatenate(weights(level))
    size = every.sum() ** 2 / (len(every) * (every**2).sum())
    np.testing.assert_allclose(found["rollout_is_eff_sample_size"], size, rtol=1e-5)
    if cfg.rollout_is is not None:
        np.testing.assert_allclose(found["rollout_is_mean"], every.mean(), rtol=1e-5)
        cut = np.isclose(every, cfg.rollout_is_threshold)
        assert 0 < cut.mean() < 1
        np.testing.assert_allclose(found["rollout_is_ratio_fraction_high"], cut.mean(), rtol=1e-5)
    if cfg.rollout_rs is not None:
        keep = kept(cfg, *bounds)
        assert 0 < np.concatenate(keep).mean() < 1
        np.testing.assert_allclose(found["rollout_rs_masked_fraction"], 1 - np.concatenate(keep).mean(), rtol=1e-5)
        rejected = np.mean([not row.all() for row in keep])
        np.testing.assert_allclose(found["rollout_rs_seq_masked_fraction"], rejected, rtol=1e-5)


def test_the_sampler_s_own_log_probabilities_are_compared_with_the_policy_that_learns() -> None:
    rejection = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.3"}
    cfg = loop(kl_coef=0.0, old_logprobs="sampler", rollout_correction=NONE | rejection)
    found = metric_sums.finalize(grpo.policy_loss_terms(NOW, ENTROPY, batch(), cfg))
    apart = -(NOW - GIVEN["sampler"])[MASK]
    rejected = 1 - ((apart >= np.log(0.8)) & (apart <= np.log(1.3))).mean()
    np.testing.assert_allclose(found["rollout_rs_masked_fraction"], rejected, rtol=1e-5)


def test_the_effective_sample_size_does_not_depend_on_how_a_batch_is_split() -> None:
    cfg, mask = RolloutCorrection(**NONE | {"rollout_is": "token"}), jnp.float32(GIVEN["mask"])
    whole = correct(jnp.float32(LOG_RATIO), mask, cfg).metrics
    parts = [correct(jnp.float32(LOG_RATIO[rows]), mask[rows], cfg).metrics for rows in (slice(0, 2), slice(2, 6))]
    together = metric_sums.merge(metric_sums.merge(metric_sums.zero(whole), parts[0]), parts[1])
    for name, value in metric_sums.finalize(whole).items():
        np.testing.assert_allclose(metric_sums.finalize(together)[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("statistic", "threshold"),
    [("token_k1", None), ("seq_mean_k1", "2.0_0.5"), ("seq_mean_k1", 1.0), ("token_k3", "0.5_2.0"), ("token_k2", "a")],
)
def test_thresholds_that_do_not_suit_are_refused(statistic: str, threshold: object) -> None:
    with pytest.raises(ValidationError, match="rollout_rs_threshold: "):
        RolloutCorrection(**NONE | {"rollout_rs": statistic, "rollout_rs_threshold": threshold})

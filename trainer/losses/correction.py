"""Corrections for samples of another policy than the one that learns: importance weights and rejection.

The ratio r is that of the trainer's policy to the sampler's. Truncated importance sampling weights each token or
response by min(r, threshold); rejection leaves out tokens or responses whose divergence is out of bounds. Names, bounds
and signs are those of verl (https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.sampling import RolloutCorrection
from trainer.step.metric_sums import EffectiveSampleSize, Mean, MetricSums


class Correction(NamedTuple):
    """What a correction changes: weights [B, T] of the loss, and 1 for tokens that stay in it, [B, T]."""

    weights: jax.Array
    kept: jax.Array
    metrics: MetricSums


def correct(log_ratio: jax.Array, mask: jax.Array, cfg: RolloutCorrection) -> Correction:
    """Return the correction for log ratios trainer / sampler [B, T]. Neither weights nor rejection have gradients.

    mask: 1 for the tokens of responses, [B, T]. Without `rollout_is` weights are 1, and the effective sample size is
    that of the tokens' ratios.
    """
    log_ratio = lax.stop_gradient(log_ratio) * mask
    by_level = log_ratio
    if cfg.rollout_is == "sequence":
        by_level = jnp.broadcast_to(log_ratio.sum(axis=1, keepdims=True), mask.shape)
    ratio = jnp.exp(by_level)
    weights = jnp.minimum(ratio, cfg.rollout_is_threshold)
    sums = ((weights * mask).sum(), (weights**2 * mask).sum(), mask.sum())
    metrics: MetricSums = {"rollout_is_eff_sample_size": EffectiveSampleSize(*sums)}
    if cfg.rollout_is is not None:
        high = (ratio > cfg.rollout_is_threshold) * mask
        metrics |= {
            "rollout_is_mean": Mean((weights * mask).sum(), mask.sum()),
            "rollout_is_ratio_fraction_high": Mean(high.sum(), mask.sum()),
        }
    kept = jnp.ones_like(mask)
    if cfg.rollout_rs is not None:
        kept = _accepted(log_ratio, mask, cfg.rollout_rs, cfg.rejection_bounds)
        has_tokens = mask.any(axis=1)
        changed = ((1 - kept) * mask).any(axis=1) & has_tokens
        metrics |= {
            "rollout_rs_masked_fraction": Mean(((1 - kept) * mask).sum(), mask.sum()),
            "rollout_rs_seq_masked_fraction": Mean(changed.sum(), has_tokens.sum()),
        }
    return Correction(jnp.ones_like(weights) if cfg.rollout_is is None else weights, kept, metrics)


def _accepted(log_ratio: jax.Array, mask: jax.Array, statistic: str, bounds: tuple[float, float]) -> jax.Array:
    """Return 1 where a token, or its whole response, has a divergence within the bounds: [B, T]."""
    *level, estimator = statistic.split("_")
    value = divergence(log_ratio, estimator) * mask
    match level:
        case ["seq", "sum"]:
            value = value.sum(axis=1, keepdims=True)
        case ["seq", "mean"]:
            value = value.sum(axis=1, keepdims=True) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
        case ["seq", "max"]:
            value = value.max(axis=1, keepdims=True)
    lower, upper = (math.log(bounds[0]), math.log(bounds[1])) if estimator == "k1" else (-math.inf, bounds[1])
    return jnp.broadcast_to((value >= lower) & (value <= upper), mask.shape).astype(mask.dtype)


def divergence(log_ratio: jax.Array, estimator: str) -> jax.Array:
    """Return an estimate k1, k2 or k3 of the KL from log p / q, for tokens of q (http://joschu.net/blog/kl-approx.html)."""
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio**2 / 2
        case _:
            return jnp.expm1(log_ratio) - log_ratio

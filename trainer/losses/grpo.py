"""The update's loss over the tokens of sampled responses: log-probabilities, corrections, penalties, metrics.

`trainer.losses.policy` has the losses themselves, one class each, advantages and the weights of samples. Corrections
are for samplers whose log-probabilities differ from the trainer's.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.loop import OFFLINE_LOSSES, GrpoLoop
from conf.schema.training.loop_parts import RolloutCorrection
from conf.schema.training.model import Model
from trainer.distributed.mesh import DeviceBatch
from trainer.losses import token_logprobs
from trainer.losses.policy import PolicyLoss, Tokens, load_loss
from trainer.models import decoder, weights
from trainer.models.routes import Replay
from trainer.models.shared_prompt import PromptGroup, prompt_group, response_hidden_states, scatter_to_columns
from trainer.step.metric_sums import EffectiveSampleSize, Max, Mean, MetricSums, Min
from trainer.step.train_step import LossFn

ROW_FIELDS = ("advantage", "weight")
"""Batch fields per row, float32 [B]. weight: 0 if a sample is filtered out of the loss, else 1."""

TOKEN_FIELDS = ("old", "reference", "sampler")
"""Batch fields per token: log-probabilities [B, T - 1].

old: the policy that drew the sample, computed by the trainer; reference: the frozen reference; sampler: the policy that
drew the sample, computed by the sampler.
"""


def per_token_logps(
    params: weights.Params,
    cfg: Model,
    batch: DeviceBatch,
    temperature: float,
    group: PromptGroup | None = None,
    replay: Replay | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each token after the first, and the entropy there: two arrays [B, T - 1].

    group: rows are ordered by prompt in such groups, and each prompt is computed once; the results then cover response
    tokens only and are 0 elsewhere. replay: of the batch.
    """
    tokens = batch["tokens"]
    if group is not None:
        starts = jnp.argmax(batch["mask"], axis=1) + 1
        hidden, targets = response_hidden_states(params, cfg, tokens, starts, group, replay)
        found = token_logprobs.token_logprobs(hidden, params, targets, cfg, temperature)
        logprobs, entropy = (scatter_to_columns(values, starts, tokens.shape[1]) for values in found)
        return logprobs, entropy
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = decoder.forward(params, cfg, tokens, positions, replay=replay)
    logprobs, entropy = token_logprobs.token_logprobs(hidden, params, jnp.roll(tokens, -1, axis=1), cfg, temperature)
    return logprobs[:, :-1], entropy[:, :-1]


def loss(cfg: Model, loop: GrpoLoop, *, grouped: bool = False) -> LossFn:
    """Return the loss of `loop.loss_type` for `train_step.build_update`.

    Each row of a batch holds tokens [T], mask [T - 1] (1 where the next token belongs to the response), TOKEN_FIELDS
    and ROW_FIELDS; with `loop.replay_routes` also routes [T, layers * per_token]. With `loop.on_policy`, `old` is
    computed here. grouped: rows are ordered by group, `loop.group_size` rows per prompt.
    """
    own = load_loss(loop)

    def sums(params: weights.Params, batch: DeviceBatch) -> MetricSums:
        group = prompt_group(cfg, loop, batch["tokens"].shape[1]) if grouped else None
        replay = Replay.of(batch)
        logprob, entropy = per_token_logps(params, cfg, batch, loop.token_temperature, group, replay)
        if loop.on_policy:
            batch = batch | {"old": lax.stop_gradient(logprob)}
        told = {} if replay is None else {"routes_changed": Mean(replay.changed, replay.known)}
        return policy_loss_terms(logprob, entropy, batch, loop, own) | told

    return sums


def policy_loss_terms(
    logprob: jax.Array, entropy: jax.Array, batch: DeviceBatch, loop: GrpoLoop, own: PolicyLoss | None = None
) -> MetricSums:
    """Return the loss and its metrics for token log-probabilities and entropies [B, T - 1].

    own: the loss; by default that of `loop.loss_type`.
    """
    own, every = own or load_loss(loop), batch["mask"]
    trained = loop.old_logprobs == "trainer"
    tokens = Tokens(
        logprob,
        batch["old"] if trained else batch["sampler"],
        batch.get("reference", jnp.zeros_like(every)),
        batch["advantage"][:, None],
        every * batch["weight"][:, None],
        batch["weight"],
    )
    found: MetricSums = {"entropy": Mean((entropy * every).sum(), every.sum())}
    weight: jax.Array | float = 1.0
    if loop.loss_type not in OFFLINE_LOSSES:
        corrected = correct(
            (batch["old"] if trained else logprob) - batch["sampler"], tokens.mask, loop.rollout_correction
        )
        found |= corrected.metrics | _sampler_metrics(batch)
        weight = corrected.weights if trained else 1.0  # the ratio itself corrects for the sampler's probabilities
        tokens = _without_rejected(tokens, corrected.kept)
    ratio = own.ratio(tokens)
    objective, metrics = own.objective(tokens, ratio)
    penalty, kl = _penalty(tokens, entropy, every, loop) if own.penalized else (jnp.zeros_like(logprob), {})
    found["loss"] = own.mean((penalty - objective * weight) * tokens.mask, tokens)
    where = tokens.mask if ratio.shape == tokens.mask.shape else tokens.weight[:, None]
    return (
        found
        | metrics
        | kl
        | {
            "ratio_mean": tokens.share(ratio),
            "ratio_min": Min(jnp.where(where > 0, ratio, jnp.inf).min()),
            "ratio_max": Max(jnp.where(where > 0, ratio, -jnp.inf).max()),
        }
    )


def _sampler_metrics(batch: DeviceBatch) -> MetricSums:
    every = batch["mask"]
    apart = jnp.abs(batch["old"] - batch["sampler"]) * every
    return {
        "sampler_trainer_logp_diff": Mean(apart.sum(), every.sum()),
        "sampler_trainer_logp_diff_max": Max(apart.max()),
    }


def _without_rejected(tokens: Tokens, kept: jax.Array) -> Tokens:
    """Leave rejected tokens out of the loss and its divisor, and rows of which none is left."""
    mask = tokens.mask * kept
    emptied = tokens.mask.any(axis=1) & ~mask.any(axis=1)
    return replace(tokens, mask=mask, weight=jnp.where(emptied, 0, tokens.weight))


def _penalty(tokens: Tokens, entropy: jax.Array, every: jax.Array, loop: GrpoLoop) -> tuple[jax.Array, MetricSums]:
    """Return the penalty of each token, and the KL. An unweighted term is left out: it has no gradient to compute."""
    penalty, found = jnp.zeros_like(tokens.logprobs), MetricSums()
    if loop.entropy_coef:
        penalty -= loop.entropy_coef * entropy
    if loop.kl_coef:
        kl = divergence((tokens.reference - tokens.logprobs) * every, loop.kl_estimator)
        penalty += loop.kl_coef * (kl * jnp.exp(tokens.log_ratio) if loop.kl_unbiased else kl)
        found["kl"] = Mean((kl * every).sum(), every.sum())
    return penalty, found


def supervised_loss(cfg: Model) -> LossFn:
    """Return response cross-entropy for the warm start; rows hold tokens [T] and mask [T - 1]."""

    def sums(params: weights.Params, batch: DeviceBatch) -> MetricSums:
        logprob, _ = per_token_logps(params, cfg, batch, 1.0)
        return {"loss": Mean(-(logprob * batch["mask"]).sum(), batch["mask"].sum())}

    return sums


class Correction(NamedTuple):
    """What a correction changes: weights [B, T] of the loss, and 1 for tokens that stay in it, [B, T]."""

    weights: jax.Array
    kept: jax.Array
    metrics: MetricSums


def correct(log_ratio: jax.Array, mask: jax.Array, cfg: RolloutCorrection) -> Correction:
    """Return the correction for log ratios trainer / sampler [B, T]. Neither weights nor rejection have gradients.

    The ratio r is that of the trainer's policy to the sampler's. Truncated importance sampling weights each token or
    response by min(r, threshold); rejection leaves out tokens or responses whose divergence is out of bounds. Names,
    bounds and signs are those of verl (https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html).

    mask: 1 for the tokens of responses, [B, T]. Without `rollout_is` weights are 1, and the effective sample size is
    that of the tokens' ratios.
    """
    log_ratio = lax.stop_gradient(log_ratio) * mask
    by_level = log_ratio
    if cfg.rollout_is == "sequence":
        by_level = jnp.broadcast_to(log_ratio.sum(axis=1, keepdims=True), mask.shape)
    ratio = jnp.exp(by_level)
    weights = jnp.minimum(ratio, cfg.rollout_is_threshold)
    sample_size = EffectiveSampleSize((weights * mask).sum(), (weights**2 * mask).sum(), mask.sum())
    metrics: MetricSums = {"rollout_is_eff_sample_size": sample_size}
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

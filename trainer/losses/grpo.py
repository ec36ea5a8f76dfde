"""Group relative policy optimization and its relatives: losses over the tokens of sampled responses.

`loop.loss_type` chooses what the probability ratio is of, and what the mean is over:

    grpo        ratio of a token; mean over each response's tokens, then over responses     arXiv 2402.03300, eq. 3
    token_mean  ratio of a token; mean over all tokens                                      arXiv 2503.14476, eq. 12
    dapo        as token_mean, with clip-higher and dynamic sampling                        arXiv 2503.14476, eq. 8
    dr_grpo     ratio of a token; sum over tokens by (responses x longest response)         arXiv 2503.20783, 3.2
    gspo        ratio of a response to the power of 1 / length; mean over responses         arXiv 2507.18071, eq. 5, 7
    rloo        ratio of a response; mean over responses                                    arXiv 2402.14740
    module:name loss of a token, from a function of the user's own; mean over all tokens    docs/extend.md

Advantages and the weights of samples come from `trainer.losses.advantage`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.loop import GRPO_LOSSES, GrpoLoop
from conf.schema.training.model import Model
from trainer.distributed.batch import DeviceBatch
from trainer.extension import load_extension
from trainer.losses import token_logprobs
from trainer.models import decoder, weights
from trainer.models.shared_prompt import PromptGroup, prompt_group, response_hidden_states, scatter_to_columns
from trainer.step.metric_sums import Max, Mean, MetricSums, Min
from trainer.step.train_step import LossFn

ROW_FIELDS = ("advantage", "weight")
"""Batch fields per row, float32 [B]. weight: 0 if a sample is filtered out of the loss, else 1."""

TOKEN_FIELDS = ("old", "reference", "sampler")
"""Batch fields per token: log-probabilities [B, T - 1].

old: the policy that drew the sample, computed by the trainer; reference: the frozen reference; sampler: the policy that
drew the sample, computed by the sampler.
"""


def per_token_logps(
    params: weights.Params, cfg: Model, batch: DeviceBatch, temperature: float, group: PromptGroup | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each token after the first, and the entropy there: two arrays [B, T - 1].

    group: rows are ordered by prompt in such groups, and each prompt is computed once; the results then cover response
    tokens only and are 0 elsewhere.
    """
    tokens = batch["tokens"]
    if group is not None:
        starts = jnp.argmax(batch["mask"], axis=1) + 1
        hidden, targets = response_hidden_states(params, cfg, tokens, starts, group)
        found = token_logprobs.token_logprobs(hidden, params, targets, cfg, temperature)
        logprobs, entropy = (scatter_to_columns(values, starts, tokens.shape[1]) for values in found)
        return logprobs, entropy
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = decoder.forward(params, cfg, tokens, positions)
    logprobs, entropy = token_logprobs.token_logprobs(hidden, params, jnp.roll(tokens, -1, axis=1), cfg, temperature)
    return logprobs[:, :-1], entropy[:, :-1]


def loss(cfg: Model, loop: GrpoLoop, *, grouped: bool = False) -> LossFn:
    """Return the GRPO loss for `train_step.build_update`.

    Each row of a batch holds tokens [T], mask [T - 1] (1 where the next token belongs to the response), TOKEN_FIELDS
    and ROW_FIELDS. With `loop.on_policy`, `old` is computed here. grouped: rows are ordered by group, `loop.group_size`
    rows per prompt.
    """

    def sums(params: weights.Params, batch: DeviceBatch) -> MetricSums:
        group = prompt_group(cfg, loop, batch["tokens"].shape[1]) if grouped else None
        logprob, entropy = per_token_logps(params, cfg, batch, loop.temperature, group)
        if loop.on_policy:
            batch = batch | {"old": lax.stop_gradient(logprob)}
        return policy_loss_terms(logprob, entropy, batch, loop)

    return sums


def policy_loss_terms(logprob: jax.Array, entropy: jax.Array, batch: DeviceBatch, loop: GrpoLoop) -> MetricSums:
    """Return the loss and its metrics for token log-probabilities and entropies [B, T - 1]."""
    every, weight = batch["mask"], batch["weight"]
    mask = every * weight[:, None]
    lengths = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
    old = batch["old"] if loop.old_logprobs == "trainer" else batch["sampler"]
    log_ratio = (logprob - old) * mask
    ratio, where = jnp.exp(log_ratio), mask
    if loop.loss_type in ("gspo", "rloo"):
        ratio = jnp.exp(log_ratio.sum(axis=1, keepdims=True) / (lengths if loop.loss_type == "gspo" else 1))
        where = weight[:, None]

    surrogate, clipped = _clipped_objective(ratio, batch["advantage"][:, None], loop)
    found: MetricSums = {}
    if loop.importance_sampling_cap is not None and loop.old_logprobs == "trainer":
        importance = jnp.exp((old - batch["sampler"]) * mask)
        surrogate = surrogate * jnp.minimum(importance, loop.importance_sampling_cap)
        found["importance_capped"] = Mean(((importance > loop.importance_sampling_cap) * mask).sum(), mask.sum())
    penalty = jnp.zeros_like(logprob)  # an unweighted penalty is left out, so it has no gradient to compute
    if loop.entropy_coef:
        penalty -= loop.entropy_coef * entropy
    if loop.kl_coef:
        kl = _kl_penalty((batch["reference"] - logprob) * every, loop.kl_estimator)
        penalty += loop.kl_coef * (kl * jnp.exp(log_ratio) if loop.kl_unbiased else kl)
        found["kl"] = Mean((kl * every).sum(), every.sum())
    if loop.loss_type == "rloo":
        penalty = penalty * lengths  # summed over the response, like its reward

    if loop.loss_type not in GRPO_LOSSES:
        own = load_extension("policy loss", loop.loss_type, "loop.loss_type", loop.loss_options)
        surrogate = -own(logprob, old, batch["advantage"][:, None], mask)
    found["loss"] = _aggregate_loss((penalty - surrogate) * mask, lengths, mask, weight, loop)
    apart = jnp.abs(batch["old"] - batch["sampler"]) * every
    return found | {
        "entropy": Mean((entropy * every).sum(), every.sum()),
        "sampler_trainer_logp_diff": Mean(apart.sum(), every.sum()),
        "sampler_trainer_logp_diff_max": Max(apart.max()),
        "clip_fraction": Mean((clipped * where).sum(), where.sum()),
        "ratio_mean": Mean((ratio * where).sum(), where.sum()),
        "ratio_min": Min(jnp.where(where > 0, ratio, jnp.inf).min()),
        "ratio_max": Max(jnp.where(where > 0, ratio, -jnp.inf).max()),
    }


def _clipped_objective(ratio: jax.Array, advantage: jax.Array, loop: GrpoLoop) -> tuple[jax.Array, jax.Array]:
    """Return min(r A, clip(r, 1 - low, 1 + high) A), and 1 where the ratio is clipped.

    Where the ratio corrects the sampler's own probabilities, `loop.importance_sampling_cap` bounds it, regardless of
    the advantage.
    """
    low = None if loop.clip_ratio_low is None else 1 - loop.clip_ratio_low
    high = None if loop.clip_ratio_high is None else 1 + loop.clip_ratio_high
    bounded = jnp.clip(ratio, low, high) * advantage
    if loop.importance_sampling_cap is not None and loop.old_logprobs == "sampler":
        ratio = jnp.minimum(ratio, loop.importance_sampling_cap)
    free = ratio * advantage
    return jnp.minimum(free, bounded), (bounded < free).astype(jnp.float32)


def _kl_penalty(difference: jax.Array, estimator: str) -> jax.Array:
    """Return the KL penalty per token for reference - policy (http://joschu.net/blog/kl-approx.html)."""
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return difference**2 / 2
        case _:
            return jnp.expm1(difference) - difference


def _aggregate_loss(terms: jax.Array, lengths: jax.Array, mask: jax.Array, weight: jax.Array, loop: GrpoLoop) -> Mean:
    """Aggregate per-token terms [B, T - 1], which are 0 where the mask is, into the loss."""
    match loop.loss_type:
        case "dr_grpo":
            return Mean(terms.sum(), weight.sum() * loop.max_new_tokens)
        case "grpo" | "gspo" | "rloo":
            return Mean((terms / lengths).sum(), weight.sum())
        case _:
            return Mean(terms.sum(), mask.sum())


def supervised_loss(cfg: Model) -> LossFn:
    """Return response cross-entropy for the warm start; rows hold tokens [T] and mask [T - 1]."""

    def sums(params: weights.Params, batch: DeviceBatch) -> MetricSums:
        logprob, _ = per_token_logps(params, cfg, batch, 1.0)
        return {"loss": Mean(-(logprob * batch["mask"]).sum(), batch["mask"].sum())}

    return sums

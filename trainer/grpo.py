"""Group relative policy optimization (https://arxiv.org/abs/2402.03300): advantages, and the clipped loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conf.decoder import Model
from conf.loop import GrpoLoop
from trainer import chunked, model, update, weights

EPSILON = 1e-6
"""Added to the standard deviation; keeps a group whose rewards are almost equal from exploding."""


def advantages(rewards: np.ndarray, std: str) -> np.ndarray:
    """How much better each sample of a group is than its group: float32 [groups, samples], as `rewards`.

    std: "population" or "sample" divides by the group's standard deviation (ddof 0 or 1), "none" by nothing
    (Dr. GRPO, https://arxiv.org/abs/2503.20783). A group whose rewards are all equal has advantages of 0.
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if std != "none":
        centred = centred / (rewards.std(axis=1, ddof=int(std == "sample"), keepdims=True) + EPSILON)
    return centred.astype(np.float32)


def logprobs(
    params: weights.Params, cfg: Model, batch: dict[str, jax.Array], temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each token but the first given those before it, and the entropy there: two [B, T - 1]."""
    tokens = batch["tokens"]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model.forward(params, cfg, tokens, positions)
    logprobs, entropy = chunked.token_logprobs(hidden, params, jnp.roll(tokens, -1, axis=1), cfg, temperature)
    return logprobs[:, :-1], entropy[:, :-1]


def clipped_terms(
    logprob: jax.Array, old: jax.Array, reference: jax.Array, advantage: jax.Array, loop: GrpoLoop
) -> dict[str, jax.Array]:
    """Per token [B, T - 1]: loss, kl, ratio, clipped (0 or 1).

    The surrogate is min(r A, clip(r, 1 - c, 1 + c) A) with r = exp(logprob - old); the penalty is k3, the estimator
    exp(d) - d - 1 with d = reference - logprob (http://joschu.net/blog/kl-approx.html). advantage: [B].
    """
    ratio = jnp.exp(logprob - old)
    each = advantage[:, None]
    bounded = jnp.clip(ratio, 1 - loop.clip, 1 + loop.clip)
    difference = reference - logprob
    kl = jnp.exp(difference) - difference - 1
    surrogate = jnp.minimum(ratio * each, bounded * each)
    clipped = (bounded * each < ratio * each).astype(jnp.float32)
    return {"loss": loop.kl * kl - surrogate, "kl": kl, "ratio": ratio, "clip_fraction": clipped}


def loss(cfg: Model, loop: GrpoLoop) -> update.Loss:
    """The loss of `update.build` on batches with, per row:

    tokens [T], mask [T - 1] (1 where the next token is of the response), old and reference [T - 1] log-probabilities,
    advantage; and facts about the samples, which are averaged on the way: see FACTS.
    Each sequence counts the same: the mean over its tokens, then over sequences, as in the paper.
    """

    def sums(params: weights.Params, batch: dict[str, Any]) -> update.Sums:
        logprob, entropy = logprobs(params, cfg, batch, loop.temperature)
        terms = clipped_terms(logprob, batch["old"], batch["reference"], batch["advantage"], loop)
        mask, rows = batch["mask"], jnp.float32(batch["mask"].shape[0])
        tokens = jnp.maximum(mask.sum(axis=1), 1)
        found = {name: ((term * mask).sum(), mask.sum()) for name, term in (terms | {"entropy": entropy}).items()}
        found["loss"] = (((terms["loss"] * mask).sum(axis=1) / tokens).sum(), rows)
        return found | {name: (batch[name].sum(), rows) for name in FACTS}

    return sums


FACTS = (
    *("reward_mean", "accuracy", "pass_at_k", "response_length", "truncated", "zero_variance_groups"),
    *("checks_timed_out", "checks_failed"),
)
"""Facts about each sample, float32 [B], known on the host; their means go through the update's one all-reduce."""


def supervised_loss(cfg: Model) -> update.Loss:
    """Cross-entropy of the response's tokens, for the warm start: batches with tokens [T] and mask [T - 1] per row."""

    def sums(params: weights.Params, batch: dict[str, Any]) -> update.Sums:
        logprob, _ = logprobs(params, cfg, batch, 1.0)
        return {"loss": (-(logprob * batch["mask"]).sum(), batch["mask"].sum())}

    return sums

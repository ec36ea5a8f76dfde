"""Advantages, and the losses of the GRPO loop, one class each, by their names in `loop.loss_type`.

A class says what the ratio is of, what its objective is, and what the mean is over. `trainer.losses.grpo` adds the
corrections and penalties that all of them share. docs/extend.md shows a class of one's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from conf.schema.training.loop import GrpoLoop
from trainer.extension import load_extension
from trainer.step.metric_sums import Mean, MetricSums

EPSILON = 1e-6
"""Added to the standard deviation so that groups with nearly equal rewards do not explode."""


EQUAL_WITHIN = 1e-9
"""Relative difference up to which rewards are equal: sums of the same terms in another order differ by less."""


def advantages(rewards: np.ndarray, std: str, leave_one_out: bool = False) -> np.ndarray:
    """Return each sample's advantage over its group: float32 [groups, samples], the shape of `rewards`.

    The baseline is the group's mean, as in GRPO (https://arxiv.org/abs/2402.03300, 4.1.2), or with leave_one_out the
    mean of the other samples, as in RLOO (https://arxiv.org/abs/2402.14740). std: "population" or "sample" divides by
    the group's standard deviation (ddof 0 or 1); "none" does not divide, as in Dr. GRPO
    (https://arxiv.org/abs/2503.20783, 3.2). A group whose rewards are all equal has advantages of exactly 0.
    """
    # In float32 the mean of equal rewards can be off by a rounding error, which the division by a standard deviation of
    # the same size turns into an advantage of up to 0.9.
    rewards = rewards.astype(np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if leave_one_out:
        samples = rewards.shape[1]
        centred = centred * (samples / (samples - 1))
    if std != "none":
        centred = centred / (rewards.std(axis=1, ddof=int(std == "sample"), keepdims=True) + EPSILON)
    return np.where(has_equal_rewards(rewards)[:, None], 0, centred).astype(np.float32)


def has_equal_rewards(rewards: np.ndarray) -> np.ndarray:
    """Return whether all rewards of each group are equal, up to EQUAL_WITHIN: [groups, samples] to bool [groups]."""
    lowest, highest = rewards.min(axis=1), rewards.max(axis=1)
    return highest - lowest <= EQUAL_WITHIN * np.maximum(np.abs(lowest), np.abs(highest))


def overlong_penalty(lengths: np.ndarray, loop: GrpoLoop) -> np.ndarray:
    """Return the penalty to add to the reward of responses of these lengths: float32 from 0 to -1.

    DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, eq. 13) falls linearly from 0 to -1 over the last
    `loop.overlong_buffer_fraction` of the maximum response length. It is zero unless `loop.overlong` is "penalize".
    """
    if loop.overlong != "penalize":
        return np.zeros(lengths.shape, np.float32)
    buffer = loop.overlong_buffer_fraction * loop.max_new_tokens
    return -np.clip((lengths - loop.max_new_tokens + buffer) / buffer, 0, 1).astype(np.float32)


def sample_weights(equal: np.ndarray, truncated: np.ndarray, loop: GrpoLoop) -> dict[str, np.ndarray]:
    """Return the weights of samples in the loss, and the filters behind them: float32 of 0 and 1.

    equal: 1 for samples of a group with equal rewards, which DAPO's dynamic sampling drops (eq. 11); truncated: 1 for
    truncated samples, which its overlong filtering drops (3.4). Dropped samples are not replaced here: the loss is the
    mean over the rest.
    """
    dropped = equal * float(loop.filter_zero_variance_groups)
    cut = truncated * float(loop.overlong == "drop")
    return {"weight": (1 - dropped) * (1 - cut), "filtered_equal": dropped, "filtered_overlong": cut}


@dataclass(frozen=True)
class Tokens:
    """What a loss sees of a batch: float32 arrays [B, T], where T counts the tokens after the first.

    Attributes:
        logprobs: under the policy that learns; the only array with a gradient.
        old_logprobs: under the policy that drew the tokens, see `loop.old_logprobs`.
        reference: under the frozen reference, or the teacher; zeros if the loop scores neither.
        advantages: [B, 1], or [B, T] where each token has its own.
        mask: 1 for tokens that count.
        weight: [B], 1 for rows that count.
    """

    logprobs: jax.Array
    old_logprobs: jax.Array
    reference: jax.Array
    advantages: jax.Array
    mask: jax.Array
    weight: jax.Array

    @property
    def log_ratio(self) -> jax.Array:
        """Log of the ratio policy / old policy of each token, 0 where the mask is."""
        return (self.logprobs - self.old_logprobs) * self.mask

    @property
    def lengths(self) -> jax.Array:
        """Tokens of each row that count, at least 1: [B, 1]."""
        return jnp.maximum(self.mask.sum(axis=1, keepdims=True), 1)

    def share(self, flags: jax.Array) -> Mean:
        """Return the mean of flags over tokens [B, T], or over rows [B, 1]."""
        where = self.mask if flags.shape == self.mask.shape else self.weight[:, None]
        return Mean((flags * where).sum(), where.sum())


Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
"""verl's names: what the mean of a loss is over. The last one divides sums by `loop.max_new_tokens`."""


class PolicyLoss:
    """The clipped objective of PPO for each token, with the mean over all tokens, as in DAPO.

    https://arxiv.org/abs/2503.14476, eq. 8 and 12. Subclasses change parts of it.

    Attributes:
        aggregation: what the mean is over.
        penalized: whether the KL and entropy terms of the config are added.
    """

    aggregation: ClassVar[Aggregation] = "token-mean"
    penalized: ClassVar[bool] = True

    def __init__(self, loop: GrpoLoop) -> None:
        self.loop = loop

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """Return the advantages of the samples of each group, float32 [groups, samples]. Called on the host."""
        return advantages(rewards, self.loop.advantage_std)

    def ratio(self, tokens: Tokens) -> jax.Array:
        """Return the ratio policy / old policy of each token [B, T], or of each response [B, 1]."""
        return jnp.exp(tokens.log_ratio)

    def objective(self, tokens: Tokens, ratio: jax.Array) -> tuple[jax.Array, MetricSums]:
        """Return what is maximized, of each token [B, T] or response [B, 1], and metrics."""
        free = ratio * tokens.advantages
        correction = self.loop.rollout_correction
        if correction.rollout_is == "token" and self.loop.old_logprobs == "sampler":
            free = jnp.minimum(ratio, correction.rollout_is_threshold) * tokens.advantages
        bounded = self.clip(ratio) * tokens.advantages
        return jnp.minimum(free, bounded), {"clip_fraction": tokens.share(jnp.float32(bounded < free))}

    def clip(self, ratio: jax.Array) -> jax.Array:
        """Return the ratio within 1 - `loop.clip_ratio_low` and 1 + `loop.clip_ratio_high`."""
        low, high = self.loop.clip_ratio_low, self.loop.clip_ratio_high
        return jnp.clip(ratio, None if low is None else 1 - low, None if high is None else 1 + high)

    def mean(self, terms: jax.Array, tokens: Tokens) -> Mean:
        """Return the loss for terms [B, T] that are 0 where the mask is."""
        match self.aggregation:
            case "token-mean":
                return Mean(terms.sum(), tokens.mask.sum())
            case "seq-mean-token-mean":
                return Mean((terms / tokens.lengths).sum(), tokens.weight.sum())
            case "seq-mean-token-sum":
                return Mean(terms.sum(), tokens.weight.sum())
            case "seq-mean-token-sum-norm":
                return Mean(terms.sum(), tokens.weight.sum() * self.loop.max_new_tokens)


class Grpo(PolicyLoss):
    """Mean over each response's tokens, then over responses (https://arxiv.org/abs/2402.03300, eq. 3)."""

    aggregation = "seq-mean-token-mean"


class DrGrpo(PolicyLoss):
    """Sum over tokens by a constant, so that length has no weight (https://arxiv.org/abs/2503.20783, 3.2)."""

    aggregation = "seq-mean-token-sum-norm"


class Gspo(Grpo):
    """Ratio of a response to the power of 1 / length (https://arxiv.org/abs/2507.18071, eq. 5 and 7)."""

    def ratio(self, tokens: Tokens) -> jax.Array:
        return jnp.exp(tokens.log_ratio.sum(axis=1, keepdims=True) / tokens.lengths)


class Rloo(PolicyLoss):
    """Ratio of a response; the baseline is the mean of the others (https://arxiv.org/abs/2402.14740).

    Penalties are summed over the response, like its reward.
    """

    aggregation = "seq-mean-token-sum"

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        return advantages(rewards, self.loop.advantage_std, leave_one_out=True)

    def ratio(self, tokens: Tokens) -> jax.Array:
        return jnp.exp(tokens.log_ratio.sum(axis=1, keepdims=True))

    def objective(self, tokens: Tokens, ratio: jax.Array) -> tuple[jax.Array, MetricSums]:
        whole, metrics = super().objective(tokens, ratio)
        return whole / tokens.lengths, metrics


class Cispo(PolicyLoss):
    """Clipped ratios as weights of the log-probabilities, without a gradient of their own, so that no token is dropped.

    https://arxiv.org/abs/2506.13585, eq. 4 and 5.
    """

    def objective(self, tokens: Tokens, ratio: jax.Array) -> tuple[jax.Array, MetricSums]:
        clipped = lax.stop_gradient(self.clip(ratio))
        return clipped * tokens.advantages * tokens.logprobs, {"clip_fraction": tokens.share(clipped != ratio)}


class MaxRl(DrGrpo):
    """Advantages over the group's mean reward: the gradient of a truncated log-likelihood of success, for rewards 0, 1.

    https://arxiv.org/abs/2602.02710, algorithm 1, up to the constant `loop.max_new_tokens`.
    """

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        mean = rewards.astype(np.float64).mean(axis=1, keepdims=True)
        return (advantages(rewards, "none") / np.where(mean > 0, mean, np.inf)).astype(np.float32)


class Distillation(PolicyLoss):
    """On-policy distillation: each token's advantage is its log ratio teacher / old policy, a reverse KL.

    https://arxiv.org/abs/2306.13649 (reverse KL on the student's samples), as a policy gradient as in
    https://thinkingmachines.ai/blog/on-policy-distillation. Rewards are reported only.
    """

    def objective(self, tokens: Tokens, ratio: jax.Array) -> tuple[jax.Array, MetricSums]:
        apart = (tokens.reference - tokens.old_logprobs) * tokens.mask
        objective, told = super().objective(replace(tokens, advantages=apart), ratio)
        return objective, told | {"teacher_kl": tokens.share(-apart)}


class Sft(PolicyLoss):
    """Cross-entropy of the data's own responses."""

    penalized = False

    def objective(self, tokens: Tokens, ratio: jax.Array) -> tuple[jax.Array, MetricSums]:
        return tokens.logprobs, {}


class Dpo(Grpo):
    """Direct preference optimization (https://arxiv.org/abs/2305.18290, eq. 7); beta is `loop.kl_coef`.

    Rows are pairs: a preferred response, then the rejected one.
    """

    penalized = False

    def objective(self, tokens: Tokens, ratio: jax.Array) -> tuple[jax.Array, MetricSums]:
        rewards = self.loop.kl_coef * ((tokens.logprobs - tokens.reference) * tokens.mask).sum(axis=1)
        margin = jnp.repeat(rewards[::2] - rewards[1::2], 2)[:, None]
        right = tokens.share(jnp.float32(margin > 0))
        return jax.nn.log_sigmoid(margin), {"reward_margin": tokens.share(margin), "reward_accuracy": right}


class OwnFunction(PolicyLoss):
    """The loss of each token from a function of the user's own, see `conf.extension.PolicyLoss`."""

    def objective(self, tokens: Tokens, ratio: jax.Array) -> tuple[jax.Array, MetricSums]:
        _, told = super().objective(tokens, ratio)
        own = load_extension("policy loss", self.loop.loss_type, "loop.loss_type", self.loop.loss_options)
        return -own(tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.mask), told


LOSSES: Mapping[str, type[PolicyLoss]] = {
    "grpo": Grpo,
    "token_mean": PolicyLoss,
    "dapo": PolicyLoss,  # its config adds clip-higher and dynamic sampling
    "dr_grpo": DrGrpo,
    "gspo": Gspo,
    "rloo": Rloo,
    "cispo": Cispo,
    "maxrl": MaxRl,
    "distillation": Distillation,
    "sft": Sft,
    "dpo": Dpo,
}


def load_loss(loop: GrpoLoop) -> PolicyLoss:
    """Return the loss of `loop.loss_type`, or the user's own class or function. Raises RunFileError."""
    if loop.loss_type in LOSSES:
        return LOSSES[loop.loss_type](loop)
    own = load_extension("policy loss", loop.loss_type, "loop.loss_type", loop.loss_options)
    made = own.func if isinstance(own, partial) else own
    return own(loop) if isinstance(made, type) else OwnFunction(loop)

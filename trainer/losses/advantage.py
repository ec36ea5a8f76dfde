"""Overlong penalties, advantages and sample weights from the rewards of a rollout. NumPy, on the host."""

import numpy as np

from conf.schema.training.loop import GrpoLoop

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

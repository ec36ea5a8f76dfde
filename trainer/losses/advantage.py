"""From the rewards of a rollout to what each sample counts for: penalties, advantages, weights. NumPy, on the host."""

from __future__ import annotations

import numpy as np

from conf.schema.training.loop import GrpoLoop

EPSILON = 1e-6
"""Added to the standard deviation; keeps a group whose rewards are almost equal from exploding."""


def advantages(rewards: np.ndarray, std: str, leave_one_out: bool = False) -> np.ndarray:
    """How much better each sample of a group is than its group: float32 [groups, samples], as `rewards`.

    The baseline is the group's mean, as in GRPO (https://arxiv.org/abs/2402.03300, 4.1.2); or, leave_one_out, the mean
    of the others, as in RLOO (https://arxiv.org/abs/2402.14740). std: "population" or "sample" divides by the
    group's standard deviation (ddof 0 or 1), "none" by nothing, as in Dr. GRPO (https://arxiv.org/abs/2503.20783, 3.2).
    A group whose rewards are all equal has advantages of 0.
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if leave_one_out:
        samples = rewards.shape[1]
        centred = centred * (samples / (samples - 1))
    if std != "none":
        centred = centred / (rewards.std(axis=1, ddof=int(std == "sample"), keepdims=True) + EPSILON)
    return centred.astype(np.float32)


def overlong_penalty(lengths: np.ndarray, loop: GrpoLoop) -> np.ndarray:
    """What is added to the reward of a response of that many tokens: float32, from 0 to -1, as `lengths`.

    DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, eq. 13): over the last
    `loop.overlong_buffer_fraction` of the longest response it falls from 0 to -1 in a straight line. Zero unless
    `loop.overlong` is "penalize".
    """
    if loop.overlong != "penalize":
        return np.zeros(lengths.shape, np.float32)
    buffer = loop.overlong_buffer_fraction * loop.max_new_tokens
    return -np.clip((lengths - loop.max_new_tokens + buffer) / buffer, 0, 1).astype(np.float32)


def sample_weights(equal: np.ndarray, truncated: np.ndarray, loop: GrpoLoop) -> dict[str, np.ndarray]:
    """Which samples count in the loss, and which do not, and why: float32 of 0 and 1, as the arguments.

    equal: 1 for the samples of a group with equal rewards, which DAPO's dynamic sampling leaves out (eq. 11);
    truncated: 1 for those that were cut off, which its overlong filtering leaves out (3.4). Here no other samples are
    drawn in their place: the loss is the mean over the rest.
    """
    dropped = equal * float(loop.filter_zero_variance_groups)
    cut = truncated * float(loop.overlong == "drop")
    return {"weight": (1 - dropped) * (1 - cut), "filtered_equal": dropped, "filtered_overlong": cut}

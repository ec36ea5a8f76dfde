"""Accuracy statistics and their confidence intervals."""

import math
from collections import Counter
from collections.abc import Sequence

Z_95 = 1.959963984540054
"""Standard deviations around the mean that hold 95 % of a normal distribution."""


def wilson_interval(right: float, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a fraction of independent answers.

    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927), 209-212.
    """
    share, z = right / total, Z_95
    centre = share + z**2 / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    below, above = ((centre + sign * spread) / (1 + z**2 / total) for sign in (-1, 1))
    return max(below, 0.0), min(above, 1.0)


def clustered_interval(means: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval for several, dependent answers per question, from the mean of each question.

    Miller, "Adding error bars to evals", https://arxiv.org/abs/2411.00640, 2.2. Where all questions have one mean, or
    none has any other than 0 and 1, they are that many independent answers, and have Wilson's interval: a variance of
    0 is no certainty.
    """
    count = len(means)
    mean = sum(means) / count
    if count == 1:
        return 0.0, 1.0
    if max(means) - min(means) < 1e-9 or {*means} <= {0.0, 1.0}:
        return wilson_interval(sum(means), count)
    error = math.sqrt(sum((m - mean) ** 2 for m in means) / (count - 1) / count)
    return max(mean - Z_95 * error, 0.0), min(mean + Z_95 * error, 1.0)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that one of k answers, drawn from the samples without replacement, is correct.

    1 - C(samples - right, k) / C(samples, k), unbiased for k <= samples: Chen et al., https://arxiv.org/abs/2107.03374,
    eq. 1.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_vote(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Return whether the most frequent answer is correct; for ties, the fraction of correct ones.

    None is no answer, and has no vote. Wang et al., https://arxiv.org/abs/2203.11171.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = {answer for answer, count in votes.items() if count == most}
    good = {answer for answer, is_right in zip(answers, right, strict=True) if is_right}
    return len(winners & good) / len(winners)


def pass_k_values(samples: int) -> list[int]:
    """Return 1, 2, 4, ..., and the number of samples itself."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples})

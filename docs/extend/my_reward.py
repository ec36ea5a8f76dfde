"""Reward: short responses. It is a plain, deterministic function."""

LONGEST = 200
"""Characters from which on there is no reward."""


def brief(response: str, answer: str) -> float:
    """Return 1 for an empty response, falling to 0 at LONGEST characters; 0 if the answer is not in it."""
    return max(0.0, 1 - len(response) / LONGEST) if answer in response else 0.0


def concise(response: str, answer: str, *, max_words: int = 100) -> float:
    """Return 1 if a response keeps to the number of words in its row's column `max_words`, or to 100 without one."""
    return float(len(response.split()) <= max_words)

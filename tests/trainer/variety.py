"""Rewards of random policies: one that tells their responses apart, and one that does not."""


def distinct_characters(response: str, answer: str) -> float:
    """The share of characters that the response has once."""
    return len(set(response)) / max(1, len(response))


def constant(response: str, answer: str) -> float:
    """The same for every response."""
    return 1.0

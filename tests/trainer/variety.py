"""A reward that tells the responses of random policies apart."""


def distinct_characters(response: str, answer: str) -> float:
    """The share of characters that the response has once."""
    return len(set(response)) / max(1, len(response))

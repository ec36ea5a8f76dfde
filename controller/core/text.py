"""Format text for people."""


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: `1 worker`, `4 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"

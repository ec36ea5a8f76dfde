"""Batches that must be split evenly over devices."""


class UnevenError(ValueError):
    """Rows that cannot be split evenly; `key` is the config key to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


def nearest_multiples(number: int, of: int) -> list[int]:
    """Return the multiples of `of` on either side of a number that is not one."""
    below = number // of * of
    return [n for n in (below, below + of) if n]

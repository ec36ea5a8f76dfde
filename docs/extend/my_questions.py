"""Data of the GRPO loop: products. A function that reads files would use `path`."""

from collections.abc import Iterator


def products(path: str, largest: int = 9) -> Iterator[dict[str, str]]:
    """Yield products of two numbers; every fifth is held out."""
    for number, (a, b) in enumerate((a, b) for a in range(2, largest + 1) for b in range(2, largest + 1)):
        if (number % 5 == 0) == (path == "test"):
            yield {"question": f"{a}x{b}=", "answer": str(a * b), "solution": f"#### {a * b}"}

"""Data of the language-model loop: a sequence of texts, read when they are needed."""


class Counting:
    """Text i counts ten numbers up from i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> str:
        return " ".join(str(index + i) for i in range(10))


def counting(path: str, size: int = 1000) -> Counting:
    """Return `size` texts; a function that reads files would use `path`."""
    return Counting(size)

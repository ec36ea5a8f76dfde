"""Values of flags: numbers within bounds, and ports. What argparse raises of them is one line in our words."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """Reads the value of a flag: a number within bounds."""

    kind: type[int] | type[float]
    least: float
    most: float = float("inf")
    opens: bool = False
    """Whether the least is left out."""

    def __call__(self, text: str) -> float:
        try:
            value = self.kind(text)
        except ValueError:
            value = float("nan")
        fits = self.least < value if self.opens else self.least <= value
        if not fits or value > self.most or value == float("inf"):
            bounds = f"{'above' if self.opens else 'of at least'} {self.least:g}"
            bounds += f" and at most {self.most:g}" if self.most < float("inf") else ""
            what = "whole number" if self.kind is int else "number"
            raise argparse.ArgumentTypeError(f"must be a {what} {bounds}, not {text!r}")
        return value


def local_path(text: str) -> str:
    """Read the name of a file or folder to write."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is an address; name a file or folder of this machine")
    return text


def html_file(text: str) -> str:
    """Read the name of an HTML page to write."""
    name, dot, ending = local_path(text).rpartition("/")[2].rpartition(".")
    if dot and name and ending.lower() not in ("html", "htm"):
        raise argparse.ArgumentTypeError(f"{text} would hold an HTML page; give it the ending .html")
    return text


COUNT, ABOVE_0 = Number(int, 1), Number(float, 0, opens=True)


def ports(text: str) -> tuple[int, int]:
    """Read `8888` or `9999:8888` as (local port, worker's port)."""
    local, colon, remote = text.partition(":")
    try:
        found = int(local), int(remote if colon else local)
    except ValueError:
        found = (-1, -1)
    if not (0 <= found[0] < 1 << 16 and 0 < found[1] < 1 << 16):
        how = "use 8888, or 9999:8888 for local port 9999 and port 8888 of the worker"
        raise argparse.ArgumentTypeError(f"invalid port {text!r}; {how}; a run stands before it")
    return found

"""What the end of a log says about why a program ended: words of JAX, libtpu, Python and Linux."""

from __future__ import annotations

import re
from enum import StrEnum


class Clue(StrEnum):
    """What was short, or sick."""

    HBM = "hbm"
    RAM = "ram"
    DISK = "disk"
    HOST = "host"


CLUES: tuple[tuple[Clue, re.Pattern[str]], ...] = (
    (
        Clue.HBM,
        re.compile(
            r"RESOURCE_EXHAUSTED[^\n]*(?:[Mm]emory|HBM|hbm)|Ran out of memory (?:in|on) (?:memory space )?(?:hbm|HBM)|"
            r"exceeds available HBM"
        ),
    ),
    (
        Clue.RAM,
        re.compile(r"^MemoryError\b|std::bad_alloc|Cannot allocate memory|\[Errno 12\]|DataLoader worker .* killed by "
                   r"signal: Killed", re.MULTILINE),
    ),
    (Clue.DISK, re.compile(r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]")),
    (
        Clue.HOST,
        re.compile(
            r"Accelerator device halted prematurely|[Cc]ore halted|slice health check failed|"
            r"TPU initialization failed|Failed to get global TPU topology|uncorrectable (?:ECC|HBM)"
        ),
    ),
)  # fmt: skip
VICTIM = re.compile(
    r"Connection (?:reset|closed) by peer|\bGloo\b|[Hh]eartbeat timeout|coordination service|CoordinationService|"
    r"Another task died|Shutdown barrier|lost its peers"
)
"""How a JAX process complains of another one that has died."""


def clue(text: str) -> Clue | None:
    """The first of the kinds above of which there is a word; None where there is none."""
    return next((kind for kind, pattern in CLUES if pattern.search(text)), None)


def is_victim(text: str) -> bool:
    """Does it speak of peers that died, and of nothing else that is known?"""
    return clue(text) is None and VICTIM.search(text) is not None

"""Match the end of a log against failure messages of JAX, libtpu, Python and Linux."""

import re
from enum import StrEnum


class FailureCause(StrEnum):
    """Resource that ran out or hardware that failed."""

    HBM = "hbm"
    RAM = "ram"
    DISK = "disk"
    HOST = "host"


LOG_PATTERNS: tuple[tuple[FailureCause, re.Pattern[str]], ...] = (
    (
        FailureCause.HBM,
        re.compile(
            r"RESOURCE_EXHAUSTED[^\n]*(?:[Mm]emory|HBM|hbm)|Ran out of memory (?:in|on) (?:memory space )?(?:hbm|HBM)|"
            r"exceeds available HBM"
        ),
    ),
    (
        FailureCause.RAM,
        re.compile(r"^(?:\[rank\d+\]: )?MemoryError\b|\b_ArrayMemoryError\b|std::bad_alloc|Cannot allocate memory|"
                   r"\[Errno 12\]|DataLoader worker .* killed by signal: Killed", re.MULTILINE),
    ),
    (FailureCause.DISK, re.compile(r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]")),
    (
        FailureCause.HOST,
        re.compile(
            r"Accelerator device halted prematurely|[Cc]ore halted|slice health check failed|"
            r"TPU initialization failed|Failed to get global TPU topology|uncorrectable (?:ECC|HBM)"
        ),
    ),
)  # fmt: skip
PEER_LOSS_PATTERN = re.compile(
    r"Connection (?:reset|closed) by peer|\bGloo\b(?!\] Rank \d+ is connected)|[Hh]eartbeat timeout|"
    r"coordination service|CoordinationService|Another task died|Shutdown barrier|lost its peers"
)
"""Messages of a JAX process whose peer has died."""
KILLED_CHILD_PATTERN = re.compile(
    r"BrokenProcessPool|exitcode *: -9|Signal 9 \(SIGKILL\)|Signals\.SIGKILL|exit status 137|exit code 137|^Killed$",
    re.MULTILINE,
)
"""Messages of a program one of whose processes was killed: Python's pools and subprocesses, torchrun, a shell."""


def match_failure(text: str) -> FailureCause | None:
    """Return the first cause above that the text matches, or None."""
    return next((kind for kind, pattern in LOG_PATTERNS if pattern.search(text)), None)


def is_secondary_failure(text: str) -> bool:
    """Return whether the text only reports lost peers and no other known cause."""
    return match_failure(text) is None and PEER_LOSS_PATTERN.search(text) is not None

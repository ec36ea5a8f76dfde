"""End a program that a later attempt of its run has replaced.

A run that moves to another pod leaves this one without a controller: the old one was stopped, cut off or fenced. Once
the record of the next attempt exists, everything below the run's prefix belongs to that attempt.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from ..storage import TransferError, object_exists


def watch_for_successor(
    bucket: str, successor: str, seconds: float, ended: threading.Event, replaced: Callable[[], None]
) -> None:
    """Call `replaced` once the record of the next attempt exists; return then, or when the program has ended.

    Args:
        bucket: bucket of the run.
        successor: object name of the next attempt's record.
        seconds: interval of the lookups.
        ended: set when the program has ended.
        replaced: ends the program.
    """
    while not ended.wait(seconds):
        try:
            if object_exists(bucket, successor):
                replaced()
                return
        except TransferError as error:  # the next lookup counts
            print(f"cannot look for a later attempt: {error}", file=sys.stderr, flush=True)

"""End a program that a later attempt of its run has replaced.

A run that moves to another pod leaves this one without a controller: the old one was stopped, cut off or fenced. Once
the record of the next attempt exists, everything below the run's prefix belongs to that attempt.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from ..process import send_signal
from ..storage import TransferError, object_exists


def fence(program: int, bucket: str | None, successor: str, seconds: float, ended: threading.Event) -> threading.Event:
    """Kill a program once the record of the next attempt exists; return an event that is set then.

    Args:
        program: process group of the program.
        bucket: bucket of the run; None: nothing is on record.
        successor: object name of the next attempt's record; empty: nothing replaces this attempt.
        seconds: interval of the lookups.
        ended: set when the program has ended.
    """
    replaced = threading.Event()

    def end() -> None:
        replaced.set()
        send_signal(os.killpg, program, signal.SIGKILL)  # it must not save: the bucket is the next attempt's

    if bucket and successor:
        order = (bucket, successor, seconds, ended, end)
        threading.Thread(target=_watch_for_successor, args=order, daemon=True).start()
    return replaced


def _watch_for_successor(
    bucket: str, successor: str, seconds: float, ended: threading.Event, end: Callable[[], None]
) -> None:
    while not ended.wait(seconds):
        try:
            if object_exists(bucket, successor):
                end()
                return
        except TransferError as error:  # the next lookup counts
            print(f"cannot look for a later attempt: {error}", file=sys.stderr, flush=True)

"""Runs and sweeps that a controller on this machine drives, told by a lock on a file, which its death releases.

In the first seconds it holds no lease, and in a new project there is no bucket in which anybody could ask it to end.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.google_errors import GoogleError
from controller.lease import REQUEST_SECONDS, Lease
from controller.records.recorder import run_folder

LOCK_FILE = "driven.lock"
PATIENCE_SECONDS = 60.0
"""How long a verb waits for a controller on this machine to end; one that asks its user something does not look."""


def run_lock(context: Context, run_id: str) -> Path:
    """Return the file that tells whether a run is driven."""
    return run_folder(context.state_dir, run_id) / LOCK_FILE


@contextmanager
def driven_here(file: Path) -> Iterator[None]:
    """Tell this machine's other processes that a controller drives what the file is of while the context is open."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = file.open("w")
    except OSError:  # a full disk must end no run
        yield
        return
    with lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def is_driven_here(file: Path) -> bool:
    """Return whether a controller on this machine drives what the file is of."""
    try:
        with file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def end_starting(context: Context, lease: Lease, file: Path, driven: str, why: str) -> bool:
    """End the controllers that have begun and hold no lease yet, those of this machine before the call returns.

    Args:
        context: that of the verb.
        lease: the lease that they will want.
        file: tells whether this machine has one.
        driven: id of the run or sweep that it would drive.
        why: what they are told.

    Returns:
        Whether this machine had one.

    Raises:
        CloudError: this machine has one that does not end.
    """
    if not _is_free(lease):
        return False  # its holder is asked for it, and others may queue behind that
    late, found = context.clock.deadline(PATIENCE_SECONDS), False
    _ask(lease, why)
    again = context.clock.deadline(REQUEST_SECONDS)
    while _is_free(lease) and is_driven_here(file):
        if not found:
            context.events.note(driven, f"a controller on this machine is starting {driven}; waiting for its end")
        found = True
        if late():
            raise CloudError(
                f"a controller on this machine is starting {driven} and has not ended within {PATIENCE_SECONDS:g} s: "
                "if it asks you something, answer or press Ctrl-C there, then run the same command again"
            )
        context.clock.sleep(min(1.0, context.poll_seconds))
        if again():  # there may have been no bucket, or it began in the second of the request
            _ask(lease, why)
            again = context.clock.deadline(REQUEST_SECONDS)
    return found


def _ask(lease: Lease, why: str) -> None:
    with suppress(GoogleError):
        lease.request_from_all(why)


def _is_free(lease: Lease) -> bool:
    """Return whether nobody holds the lease, as far as this can be read."""
    try:
        return lease.current_other() is None
    except GoogleError:
        return True

"""Limits of a first contact: what ends it early, besides Ctrl-C."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self


def interrupt_main_thread() -> None:
    """Do what Ctrl-C does: whatever the main thread is doing ends in order."""
    os.kill(os.getpid(), signal.SIGINT)


class TimeLimit:
    """Interrupts the work inside its block after some seconds, or when `stop` is called from another thread."""

    def __init__(self, seconds: float, interrupt: Callable[[], object] = interrupt_main_thread) -> None:
        self.reason = ""
        """Why the work was interrupted, empty if it was not."""
        self._seconds, self._interrupt = seconds, interrupt
        self._lock, self._closed = threading.Lock(), False
        self._timer: threading.Timer | None = None

    def stop(self, reason: str) -> None:
        """Interrupt the block, once."""
        with self._lock:
            if self._closed or self.reason:
                return
            self.reason = reason
            self._interrupt()

    def __enter__(self) -> Self:
        minutes = f"{self._seconds / 60:g} minutes"
        self._start_timer(lambda: self.stop(f"the limit of {minutes} is reached"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self, reach: Callable[[], None]) -> None:
        self._timer = threading.Timer(self._seconds, reach)
        self._timer.daemon = True
        self._timer.start()


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Treat a closed terminal and a request to end like Ctrl-C, so that the clean-up still happens."""

    def hang_up(*_: object) -> None:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - the terminal is closed
        interrupt_main_thread()

    handlers = {signal.SIGTERM: lambda *_: interrupt_main_thread(), signal.SIGHUP: hang_up}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def shielded(say: Callable[[str], object]) -> Iterator[None]:
    """Answer the first Ctrl-C inside the block with what is going on; the second one interrupts."""
    pressed: list[int] = []

    def answer(number: int, frame: object) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt
        say("cleaning up; Ctrl-C again stops that and leaves what is billed")

    before = signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""A time that stands still until a request moves it on: the emulated cloud's, while a recording is replayed.

What is due in between happens in its order and at its moment, however busy this machine is.
"""

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Moves the time on, as far as it may, to the next moment at which something is due."""

    def __init__(self) -> None:
        super().__init__()
        self.passed, self.until = 0.0, 0.0
        self.busy = 0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.busy or self.passed >= self.until:
            return super().select(None)
        left = self.until - self.passed
        self.passed = self.until if timeout is None or timeout >= left else self.passed + timeout
        return []


class HeldLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes by `move_on` alone, and never while a thread of it works."""

    def __init__(self) -> None:
        self._held = _Selector()
        self._began = time.monotonic()
        super().__init__(self._held)

    def time(self) -> float:
        return self._began + self._held.passed

    def hold_time(self) -> None:
        """Make the whole process, which is an emulated cloud, live in the time of this loop until it ends."""
        began = time.time()
        time.time = lambda: began + self._held.passed
        time.monotonic = self.time

    async def move_on(self, seconds: float) -> None:
        self._held.until = max(self._held.until, self._held.passed + seconds)
        await asyncio.sleep(seconds)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        work = super().run_in_executor(executor, func, *arguments)
        self._held.busy += 1
        work.add_done_callback(self._end_work)
        return work

    def _end_work(self, _: object) -> None:
        self._held.busy -= 1

"""Clocks on which nobody waits."""

from collections.abc import Callable

from controller.core.this_process import Clock, InterruptedSleepError

NEVER = float("inf")


class ManualClock(Clock):
    """Only sleeping moves it, and who sets `elapsed`; all times in seconds.

    Attributes:
        start: its time of day at the beginning, since the epoch.
        step: the least by which one sleep moves it.
        sleeps: how long was slept, in order.
        interrupt_at: when somebody presses Ctrl-C.
        on_sleep: what happens during each sleep.
    """

    def __init__(self, start: float = 0.0, step: float = 0.0, on_sleep: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.start, self.step, self.on_sleep = start, step, on_sleep
        self.elapsed, self.interrupt_at = 0.0, NEVER
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self.start + self.elapsed

    def monotonic(self) -> float:
        return self.elapsed

    def boot_time(self) -> float:
        return self.elapsed

    def sleep(self, seconds: float) -> None:
        self.raise_if_interrupted()
        self.sleeps.append(seconds)
        self.elapsed += max(seconds, self.step)
        if self.elapsed >= self.interrupt_at:
            raise InterruptedSleepError
        self.on_sleep()


class HurriedClock(Clock):
    """The real time, but sleeping is only written down: for emulated clouds, which live in real time.

    `interrupt_at`: how often it may be slept until somebody presses Ctrl-C, once; 0: nobody does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sleeps: list[float] = []
        self.interrupt_at = 0

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        if self.interrupt_at and len(self.sleeps) >= self.interrupt_at:
            self.interrupt_at = 0
            raise InterruptedSleepError

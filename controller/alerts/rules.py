"""Rules that compare a metric with the attempt's own past, or with a limit of the config."""

import statistics
from collections import deque
from dataclasses import dataclass, field

LINES_TO_CHANGE = 2
"""Metrics lines in a row that begin or end an alert about the speed, and that end one about the loss."""
MAD_TO_SIGMA = 1.4826
"""The standard deviation of a normal distribution divided by its median absolute deviation."""
SPIKE_SIGMAS = 6.0
"""Distance from the median, in standard deviations, below which a loss is noise."""


@dataclass
class Sustained:
    """Whether a condition has lasted: it begins after `seconds` and `lines`, and is over after two good lines."""

    seconds: float = 0.0
    lines: int = 1
    """Metrics lines that must show it before it begins."""
    active: bool = False
    since: float | None = None
    """When the condition was first met, while it is."""
    _bad: int = 0
    _good: int = 0

    def update(self, bad: bool, now: float) -> bool:
        """Add a line; return whether the alert began or ended."""
        before = self.active
        if bad:
            self.since = now if self.since is None else self.since
            self._bad, self._good = self._bad + 1, 0
            self.active = before or (self._bad >= self.lines and now - self.since >= self.seconds)
        else:
            self._good += 1
            if not before or self._good >= LINES_TO_CHANGE:
                self.active, self.since, self._bad = False, None, 0
        return self.active != before


@dataclass
class History:
    """The last values of a metric in one phase of the program."""

    size: int
    enough: int
    """Number of values from which the median says something."""
    values: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.values = deque(maxlen=self.size)

    def median(self) -> float | None:
        return statistics.median(self.values) if len(self.values) >= self.enough else None

    def spike_limit(self, factor: float) -> float | None:
        """Return the value above which a loss is a spike; None while too little is known, or the median is not > 0.

        The median of negative numbers cannot be multiplied, and a loss that is noise around 0 has no spikes.
        """
        middle = self.median()
        if middle is None or middle <= 0:
            return None
        deviation = MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in self.values)
        return max(factor * middle, middle + SPIKE_SIGMAS * deviation)

"""Which samplers the trainer hears from, and for how long it waits for one. The caller tells the time."""

from collections.abc import Sequence

REPORT_SECONDS = 60.0
"""Interval of the log lines while the trainer hears from no sampler."""
LIMIT_SECONDS = 1800.0
"""Silence of all samplers that ends the attempt: longer than a sampler keeps its task, a restart and a compilation."""


class SamplersLostError(RuntimeError):
    """No sampler has been heard from for too long. All processes of the trainer raise it together."""


class Presence:
    """When each sampler was last heard from. Not thread-safe.

    What counts is what a sampler's main thread sends. Requests for weights come from another thread, which goes on
    while the sampler hangs.
    """

    def __init__(self, samplers: Sequence[str]) -> None:
        """samplers: their names."""
        self._heard: dict[str, float | None] = dict.fromkeys(samplers)
        self._since = self._reported = 0.0

    def hear(self, sampler: str, now: float) -> None:
        """Note a message."""
        self._heard[sampler] = now

    def begin(self, now: float) -> None:
        """Start to wait for a rollout: samplers without tasks had nothing to send before."""
        self._since = self._reported = now

    def report(self, now: float) -> str:
        """Return a line for the log, once every REPORT_SECONDS of silence; otherwise an empty one.

        Raises:
            SamplersLostError: all samplers have been silent for LIMIT_SECONDS.
        """
        silence = now - max([self._since, *(time for time in self._heard.values() if time is not None)])
        if silence >= LIMIT_SECONDS:
            raise SamplersLostError(
                f"loop.sampler: no sampler has sent anything for {silence / 60:.0f} minutes: "
                f"{self._description(now)}. Their logs say why; they need to reach worker 0 on any TCP port"
            )
        if silence < REPORT_SECONDS or now - self._reported < REPORT_SECONDS:
            return ""
        self._reported = now
        return (
            f"waiting for a sampler (loop.sampler), for at most {LIMIT_SECONDS / 60:.0f} minutes: "
            f"{self._description(now)}"
        )

    def _description(self, now: float) -> str:
        parts = [
            f"{name} " + ("has never connected" if time is None else f"was last heard {now - time:.0f} s ago")
            for name, time in self._heard.items()
        ]
        return ", ".join(parts)

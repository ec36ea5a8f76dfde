"""The preemption of a rehearsal: it strikes once the program has begun; the steps show where the program resumed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from controller.core.events import Event

FAULT_KEY = "rehearsal"
SECONDS_AFTER_OUTPUT = 4.0
"""Seconds from the program's first line of log or metrics to the preemption."""
PREEMPTION = {"kind": "preempted", "after_requests": 0, "delay_seconds": SECONDS_AFTER_OUTPUT}
"""The fault; the controller's next request to Google triggers it."""
MAX_STEP = 1e15


@dataclass
class _Steps:
    """First and last step that an attempt reported."""

    first: int
    last: int


@dataclass
class Interruption:
    """Event listener that strikes after the program's first output, if `strike` is set, and keeps its steps."""

    strike: Callable[[], None] | None = None
    has_struck: bool = False
    attempt: int = 0
    total: int | None = None
    _steps: dict[int, _Steps] = field(default_factory=dict)
    _newest: float = 0.0

    def __call__(self, event: Event) -> None:
        if event.kind == "note" and event.data.get("launched"):
            self.attempt = event.data["attempt"]
        elif event.kind in ("log", "metrics") and self.attempt:
            if event.kind == "metrics":
                self._record(event.data["metrics"])
            if self.strike is not None and not self.has_struck:
                self.has_struck = True
                self.strike()

    def _record(self, metrics: dict[str, Any]) -> None:
        """Keep the step of a line, unless it is a line of an earlier attempt that the program has restored."""
        time, step, total = (_number(metrics.get(name)) for name in ("time", "step", "steps_total"))
        if step is None or (time is not None and time <= self._newest):
            return
        self._newest = self._newest if time is None else time
        self.total = self.total if total is None else int(total)
        steps = self._steps.setdefault(self.attempt, _Steps(int(step), int(step)))
        steps.last = int(step)

    def resumption(self) -> tuple[bool, str]:
        """Return whether the last attempt went on after its predecessor's first step, and from where it went on."""
        of = f" of {self.total}" if self.total else ""
        earlier = [steps for attempt, steps in self._steps.items() if attempt < self.attempt]
        now = self._steps.get(self.attempt)
        if now is None:
            return False, "from where is unknown, because it reports no steps in $SLIPWAY_RUN_DIR/metrics.jsonl"
        if not earlier:
            return False, f"at step {now.first}{of}; no step arrived before the preemption to compare it with"
        if now.first > earlier[0].first:
            return True, f"at step {now.first}{of}; step {earlier[-1].last} was reached before"
        return False, f"from the beginning, at step {now.first}{of}: it loaded no checkpoint"


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and abs(value) < MAX_STEP else None

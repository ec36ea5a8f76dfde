"""Averages of metrics over the updates since the last metric line."""

import math
from typing import Any

LATEST_VALUE_METRICS = ("learning_rate", "skipped", "finite")
"""Metrics reported as of the newest update."""


class MetricAverages:
    """Means over updates, weighting every sample equally; extremes, by name; and the latest values of some.

    Checkpoints store them, so that a resumed run writes the same lines.
    """

    def __init__(self, count: int = 0, values: dict[str, float] | None = None) -> None:
        self._count, self._values = count, values or {}

    def add(self, values: dict[str, float]) -> None:
        """Add an update's metrics. For a skipped, non-finite update, only the latest values count."""
        left_out = not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]))
        self._count += not left_out
        for name, value in values.items():
            if name in LATEST_VALUE_METRICS:
                self._values[name] = value
            elif not left_out:
                self._values[name] = self._merged(name, value)

    def _merged(self, name: str, value: float) -> float:
        known = self._values.get(name)
        if known is None:
            return value
        if name.endswith("_min"):
            return min(known, value)
        return max(known, value) if name.endswith("_max") else known + value

    def pop(self) -> dict[str, float]:
        found = {
            name: value if name in LATEST_VALUE_METRICS or name.endswith(("_min", "_max")) else value / self._count
            for name, value in self._values.items()
        }
        self._count, self._values = 0, {}
        return found

    @property
    def is_empty(self) -> bool:
        return not self._values

    def to_json(self) -> dict[str, Any]:
        return {"updates": self._count, "values": dict(self._values)}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "MetricAverages":
        return cls(body["updates"], body["values"])

"""How far a GRPO run has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Where the run is, apart from arrays and rollouts."""

    phase: str = "warm_start"
    warm_steps: int = 0  # supervised updates done
    steps: int = 0  # GRPO updates done
    accuracy_start: float = 0.0
    accuracy_before: float = 0.0  # of the newest evaluation before GRPO
    test_before: dict[str, float] = field(default_factory=dict)  # metrics of the test before GRPO

    @property
    def total_steps(self) -> int:
        """Both phases on one axis: the step of metrics and checkpoints."""
        return self.warm_steps + self.steps

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        accuracy = {"accuracy_start": self.accuracy_start, "accuracy_before": self.accuracy_before}
        steps = {"phase": self.phase, "warm_steps": self.warm_steps, "steps": self.steps}
        return {**steps, **accuracy, "test_before": self.test_before}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Progress:
        steps = (body["phase"], body["warm_steps"], body["steps"])
        return cls(*steps, body["accuracy_start"], body["accuracy_before"], body["test_before"])

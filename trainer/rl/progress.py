"""Progress of a GRPO run."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Counters and results of a run, apart from arrays and rollouts."""

    phase: str = "warm_start"
    warm_steps: int = 0  # supervised updates so far
    steps: int = 0  # GRPO updates so far
    accuracy_start: float = 0.0
    accuracy_before: float = 0.0  # from the last evaluation before GRPO
    test_before: dict[str, float] = field(default_factory=dict)  # metrics of the test before GRPO

    @property
    def total_steps(self) -> int:
        """Return the updates of both phases: the step of metrics and checkpoints."""
        return self.warm_steps + self.steps

    def to_json(self) -> dict[str, Any]:
        accuracy = {"accuracy_start": self.accuracy_start, "accuracy_before": self.accuracy_before}
        steps = {"phase": self.phase, "warm_steps": self.warm_steps, "steps": self.steps}
        return {**steps, **accuracy, "test_before": self.test_before}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "Progress":
        steps = (body["phase"], body["warm_steps"], body["steps"])
        return cls(*steps, body["accuracy_start"], body["accuracy_before"], body["test_before"])

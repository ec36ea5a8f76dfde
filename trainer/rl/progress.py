"""Progress of a GRPO run."""

from dataclasses import asdict, dataclass, field
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
        """Return what `Progress(**body)` restores."""
        return asdict(self)

"""A fleet that answers what a test tells it, and writes down what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from controller.context import Context


@dataclass
class FakeFleet:
    """Answers of each command: a list with one per worker, or a function that makes it."""

    answers: dict[str, Any]
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def call_all(self, command: str, payload: Any, workers: Any = None) -> list[Any]:
        self.asked.append((str(command), payload))
        answer = self.answers[str(command)]
        return answer() if isinstance(answer, Callable) else answer

    def observe(self, who: str, payload: Any) -> list[Any]:
        return self.call_all("observe", payload)

    def fleet(self, context: Context) -> FakeFleet:
        """As the pod that it is the fleet of."""
        return self

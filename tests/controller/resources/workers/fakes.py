"""A fleet that answers what a test tells it, and writes down what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from controller.context import Context
from controller.core.clock import Clock
from controller.core.events import Events


class NoSleep(Clock):
    """Sleeping takes no time."""

    def sleep(self, seconds: float) -> None:
        pass


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


def make_context(notes: list[str]) -> Context:
    clock, none = NoSleep(), cast(Any, None)
    events = Events(clock)
    events.add_listener(lambda event: notes.append(event.message) if event.kind == "note" else None)
    return Context("slipway-local", none, clock, events, none, none, 0.01, none)

"""What both phases of the GRPO loop leave behind: lines of metrics, evaluations, checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from conf.loop import GrpoLoop
from conf.runfile import RunFile
from trainer import update
from trainer.checkpoint import Checkpoints
from trainer.diverged import check_finite
from trainer.evaluation import Evaluation
from trainer.metrics import Metrics


@dataclass
class Position:
    """Where the run is, apart from the arrays: what a checkpoint keeps as JSON."""

    phase: str = "warm_start"
    warm_steps: int = 0  # supervised updates done
    steps: int = 0  # GRPO steps done
    accuracy_start: float = 0.0
    accuracy_before: float = 0.0  # of the newest evaluation before GRPO

    @property
    def total(self) -> int:
        """Both phases on one axis: the step of metrics and checkpoints."""
        return self.warm_steps + self.steps


class Journal:
    """Of one process's part of a run."""

    def __init__(
        self, experiment: RunFile, loop: GrpoLoop, log: Metrics, checkpoints: Checkpoints, evaluation: Evaluation
    ) -> None:
        self._experiment, self._loop, self._log = experiment, loop, log
        self._checkpoints, self._evaluation = checkpoints, evaluation
        self._unseen: tuple[int, Any, Any] | None = None
        self.compile_seconds = 0.0

    def evaluate(self, state: update.State, position: Position, phase: str, words: str) -> float:
        """The accuracy on the held-out questions, written down. phase: eval, or warm_start."""
        began = time.perf_counter()
        accuracy = self._evaluation.accuracy(update.for_evaluation(state))
        self._log.log(position.total, phase, eval_accuracy=accuracy, eval_time=time.perf_counter() - began)
        if phase == "eval":
            self._checkpoints.score(position.total, eval_accuracy=accuracy)
        if jax.process_index() == 0 and phase == "eval":
            prompts = len(self._evaluation.held_out)
            print(f"{words}: {accuracy:.3f} on {prompts} held-out prompts (step {position.total})", flush=True)
        return accuracy

    def line(self, phase: str, position: Position, metrics: Any, seconds: float, tokens: float) -> None:
        """A line of metrics. seconds: of the step, without compilation; tokens: drawn or trained on in them."""
        self.look()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        left = self._loop.warm_start_steps - position.warm_steps if phase == "warm_start" else 0
        speed = {"step_time": seconds, "tokens_per_second": tokens / seconds}
        if self.compile_seconds:
            speed["compile_time"], self.compile_seconds = self.compile_seconds, 0.0
        total = position.total + left + self._loop.steps - position.steps
        self._log.log(position.total, phase, **values, **speed, steps_total=total)

    def note(self, step: int, metrics: Any, drawn: dict[str, np.ndarray]) -> None:
        """An update, to be looked at when the next one is under way; until then the devices need not be waited for."""
        self.look()
        self._unseen = (step, metrics, drawn)

    def look(self) -> None:
        """See that the last update noted went well. Raises DivergedError where the run is to stop."""
        if self._unseen:
            check_finite(*self._unseen, self._experiment)
        self._unseen = None

    def timed(self, train: Any, state: update.State, batch: Any) -> tuple[update.State, dict[str, jax.Array]]:
        """A first update, whose compilation is counted apart."""
        began = time.perf_counter()
        train.lower(state, batch).compile()
        self.compile_seconds += time.perf_counter() - began
        return train(state, batch)

    def save(self, state: update.State, position: Position) -> None:
        """Metrics first: a resume at this step reads them."""
        self.look()
        self._log.upload()
        self._checkpoints.save(position.total, state, vars(position).copy())

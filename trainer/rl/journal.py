"""What the GRPO loop leaves behind: lines of metrics, evaluations, alerts, checkpoints; and how it hears of its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
from trainer.checkpoint.manager import Checkpoints, Resumed
from trainer.distributed.preemption import Notice, NoticedError
from trainer.evaluation.accuracy import Evaluation, Result
from trainer.rl.rollouts import Rollout
from trainer.step import train_step
from trainer.step.nan_check import check_finite
from trainer.telemetry import startup_report, throughput
from trainer.telemetry.alerts import Alerts
from trainer.telemetry.averages import Window
from trainer.telemetry.metrics import Metrics

BASELINE_QUESTIONS = 64


@dataclass
class Position:
    """Where the run is, apart from arrays and rollouts."""

    phase: str = "warm_start"
    warm_steps: int = 0  # supervised updates done
    steps: int = 0  # GRPO updates done
    accuracy_start: float = 0.0
    accuracy_before: float = 0.0  # of the newest evaluation before GRPO
    test_before: dict[str, float] = field(default_factory=dict)  # metrics of the test before GRPO

    @property
    def total(self) -> int:
        """Both phases on one axis: the step of metrics and checkpoints."""
        return self.warm_steps + self.steps


@dataclass
class Standing:
    """All that a checkpoint keeps. ready: rollouts that are drawn and not learnt from yet, the oldest first."""

    state: train_step.State
    position: Position
    ready: deque[Rollout]


@dataclass(frozen=True)
class _Update:
    """One that is under way, and what its line will tell."""

    position: Position
    metrics: dict[str, jax.Array]
    batch: dict[str, np.ndarray]
    facts: dict[str, float]


class Journal:
    """Of one process's part of a run; all processes call every method, in the same order."""

    def __init__(
        self,
        experiment: RunFile,
        loop: GrpoLoop,
        log: Metrics,
        checkpoints: Checkpoints,
        notice: Notice,
        evaluation: Evaluation,
    ) -> None:
        self._experiment, self._loop, self._log = experiment, loop, log
        self._checkpoints, self._notice, self._evaluation = checkpoints, notice, evaluation
        self._window, self._alerts = Window(), Alerts(loop.alerts, loop.steps)
        self._unseen: _Update | None = None
        self._first = self._logged = 0
        self._paced = False
        self.watch = throughput.Stopwatch("rollout_time", "reward_time", "score_time", "update_time")
        self.tokens = {"rollout": 0, "update": 0}
        self.costs: dict[str, float] = {}

    def restored(self, resumed: Resumed, mesh: Mesh) -> Standing:
        """Where a checkpoint stands; the journal goes on as it was then."""
        saved = resumed.position
        self._window, self._alerts.remembered = Window(**saved["window"]), saved["alerts"]
        ready = deque(Rollout.restored(rollout, mesh) for rollout in saved["ready"])
        return Standing(resumed.state, Position(**saved["position"]), ready)

    def resume(self, at: Standing) -> None:
        """Go on after the updates that are done."""
        self._first = self._logged = at.position.total
        self._log.resume(at.position.total)
        self.restart_clock()

    def restart_clock(self) -> None:
        """What went before is no part of the next line's times."""
        self.watch.lap(1)

    def save(self, at: Standing) -> None:
        """Metrics first: a resume at this step reads them."""
        self.look()
        with self.watch.apart():
            self._log.upload()
            told: dict[str, Any] = {
                "position": asdict(at.position),
                "window": self._window.saved(),
                "alerts": self._alerts.remembered,
            }
            told["ready"] = [rollout.saved() for rollout in at.ready]
            self._checkpoints.save(at.position.total, at.state, told if jax.process_index() == 0 else {})

    def heed(self, at: Standing) -> None:
        """Where the VM is about to go: save, and end on all processes. Raises NoticedError."""
        if self._notice.agreed(at.position.total):
            if at.position.total > self._first:
                self.save(at)
            raise NoticedError

    def verify(self, at: Standing) -> None:
        """Compare the copies of the state, if this is the turn. Raises DisagreementError."""
        with self.watch.apart():
            self._checkpoints.verify(at.position.total, at.state)

    def evaluate(self, at: Standing, phase: str, words: str) -> float:
        """The accuracy on the held-out questions, written down. phase: eval, or warm_start."""
        self.look()
        with self.watch.apart():
            step = at.position.total
            between = (lambda: self.heed(at)) if phase == "eval" else lambda: None
            found = self._evaluation.greedy(train_step.for_evaluation(at.state), between=between)
            self._log.log(step, phase, **found.values)
        if phase == "eval":
            self._log.transcripts(step, phase, found.transcripts)
            self._checkpoints.score(step, eval_accuracy=found.accuracy)
            self.tell([f"{words}: {_share(found)} on {self._loop.eval_prompts} held-out prompts (step {step})"])
        return found.accuracy

    def test(self, at: Standing, when: str) -> dict[str, float]:
        """Write down the metrics of the test and return them; none if `loop.test_samples_per_prompt` is null.

        when: before, or after.
        """
        self.look()
        with self.watch.apart():
            found = self._evaluation.test(train_step.for_evaluation(at.state), lambda: self.heed(at))
            if found is None:
                return {}
            self._log.log(at.position.total, "test", **found.values)
            self._log.transcripts(at.position.total, "test", found.transcripts)
        more = [f"{name.removeprefix('test_')} {v:.3f}" for name, v in found.values.items() if "_at_" in name]
        self.tell([f"test {when} GRPO: {_share(found)}, {', '.join(more)}"])
        return {name: value for name, value in found.values.items() if name != "test_time"}

    def note(
        self, at: Standing, metrics: dict[str, jax.Array], batch: dict[str, np.ndarray], facts: dict[str, float]
    ) -> None:
        """An update, to be looked at when the next one is under way; until then the devices need not be waited for.

        facts: of its rollout; none in the warm start.
        """
        self.look()
        self._unseen = _Update(Position(**asdict(at.position)), metrics, batch, facts)

    def look(self) -> None:
        """Wait for the last update noted, and tell of it. Raises DivergedError where the run is to stop."""
        if self._unseen is None:
            return
        last, self._unseen = self._unseen, None
        step, every = last.position.total, self._experiment.logging.log_interval
        with self.watch.spending("update_time"):
            check_finite(step, last.metrics, last.batch, self._experiment)
            values = {name: float(value) for name, value in jax.device_get(last.metrics).items()} | last.facts
        self._window.add(values)
        self.tokens["update"] += int(last.batch["mask"].sum())
        if last.facts:
            self._alert(last.position.steps, values)
        if last.position.steps == 1:
            self.tell(startup_report.first_update(values, self._loop))
        if step % every == 0 or last.position.steps == self._loop.steps:
            self._line(last.position)

    def end_phase(self, at: Standing) -> None:
        """A last line of the warm start: its numbers and GRPO's are not of one kind."""
        self.look()
        if not self._window.empty:
            self._line(at.position)

    def _alert(self, step: int, values: dict[str, float]) -> None:
        if said := self._alerts.look(step, values):
            self.tell(said)
            self._log.text(step, "alerts", "\n\n".join(said))

    def _line(self, position: Position) -> None:
        """The updates since the line before."""
        count, self._logged = max(1, position.total - self._logged), position.total
        times = self.watch.lap(count)
        times["other_time"] = 2 * times["step_time"] - sum(times.values())
        spent = {"rollout": times["rollout_time"], "update": times["update_time"]}
        rates = {
            f"{name.replace('update', 'train')}_tokens_per_second": tokens / count / spent[name]
            for name, tokens in self.tokens.items()
            if spent[name]
        }
        rates["tokens_per_second"] = self.tokens["update"] / count / times["step_time"]
        self.tokens = dict.fromkeys(self.tokens, 0)
        left = self._loop.warm_start_steps - position.warm_steps if position.phase == "warm_start" else 0
        total = position.total + left + self._loop.steps - position.steps
        values = self._window.take() | times | rates | throughput.memory() | self.costs
        self.costs = {}
        self._log.log(position.total, position.phase, **values, steps_total=total)
        if position.phase == "grpo" and not self._paced:
            self._paced = True
            self.tell([startup_report.pace(values, self._loop.steps - position.steps)])

    def tell_baseline(self, at: Standing) -> None:
        """How often the policy is right before anything is learnt, on a few questions."""
        with self.watch.apart():
            count = min(BASELINE_QUESTIONS, self._loop.eval_prompts)
            found = self._evaluation.greedy(train_step.for_evaluation(at.state), count)
        self.tell([f"baseline: {_share(found)} of {count} held-out questions answered rightly"])

    def tell(self, lines: Iterable[str]) -> None:
        """Words for the log of the first process."""
        if jax.process_index() == 0:
            for line in lines:
                print(line, flush=True)

    def summarize(self, at: Standing, **facts: float) -> None:
        """The last evaluation, and the results of the run."""
        after = self.evaluate(at, "eval", "accuracy after GRPO")
        tests = {"before": at.position.test_before, "after": self.test(at, "after")}
        self._log.summarize(
            accuracy_before=at.position.accuracy_before,
            accuracy_after=after,
            eval_prompts=self._loop.eval_prompts,
            warm_start_steps=at.position.warm_steps,
            steps=at.position.steps,
            **facts,
            **{f"{name}_{when}": value for when, values in tests.items() for name, value in values.items()},
        )


def _share(found: Result) -> str:
    low, high = found.interval
    return f"{found.accuracy:.3f} ({low:.3f} to {high:.3f})"

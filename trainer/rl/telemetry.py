"""Progress and metrics of GRPO updates: averages between two metric lines, times, rates and alerts.

`loop.alerts` sets the thresholds of alerts for runs that make no progress; each is raised once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

import conf.schema.training.loop
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
from trainer.distributed.mesh import Batch
from trainer.step.batch_check import BatchCheck
from trainer.step.nan_diagnosis import check_finite
from trainer.telemetry import startup_report, throughput
from trainer.telemetry.metrics import MetricsLogger


@dataclass
class Progress:
    """Counters and results of a run, apart from arrays and rollouts."""

    phase: str = "warm_start"
    warm_steps: int = 0  # supervised updates so far
    steps: int = 0  # GRPO updates so far
    solutions_left_out: int = 0  # worked episodes of the warm start that did not fit
    accuracy_start: float = 0.0
    accuracy_before: float = 0.0  # from the last evaluation before GRPO
    test_before: dict[str, float] = field(default_factory=dict)  # metrics of the test before GRPO

    @property
    def total_steps(self) -> int:
        """Return the updates of both phases: the step of metrics and checkpoints."""
        return self.warm_steps + self.steps


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
        if name.endswith(("_min", "_max")):  # Python's min and max keep or lose a NaN by its place; NumPy's keep it
            return float((np.minimum if name.endswith("_min") else np.maximum)(known, value))
        return known + value

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


class AlertMonitor:
    """Checks every update. Checkpoints store its state, so that a resumed run raises the same alerts."""

    def __init__(self, settings: conf.schema.training.loop.Alerts, last: int) -> None:
        """Create a monitor. last: number of the phase's last update."""
        self._settings, self._last_step = settings, last
        self.state: dict[str, Any] = {"told": [], "lasting": [], "without_answer": 0, "equal": 0, "had_a_rate": False}

    def check(self, step: int, values: dict[str, float]) -> dict[str, str]:
        """Return the message of each alert that begins after update `step` of the phase with these metrics, by its name
        in the controller; one that is over has none.
        """
        wanted, seen = self._settings, self.state
        seen["without_answer"] = seen["without_answer"] + 1 if values["accuracy"] == 0 else 0
        seen["equal"] = seen["equal"] + 1 if values["zero_variance_groups"] == 1 else 0
        seen["had_a_rate"] = seen["had_a_rate"] or values["learning_rate"] > 0
        found: dict[str, str] = {}
        if wanted.zero_learning_rate and seen["had_a_rate"] and values["learning_rate"] == 0 and step < self._last_step:
            found["learning_rate"] = (
                f"the learning rate is 0 with {self._last_step - step} updates to go: check optimizer.schedule"
            )
        if wanted.entropy_below is not None and values["entropy"] < wanted.entropy_below:
            found["entropy"] = (
                f"the policy's entropy at loop.temperature is {values['entropy']:.2g} nats, so it hardly explores; "
                "raise loop.temperature, loop.kl_coef or loop.entropy_coef, or lower optimizer.lr"
            )
        if wanted.zero_accuracy_updates is not None and seen["without_answer"] >= wanted.zero_accuracy_updates:
            found["accuracy"] = (
                f"no answer was right in {seen['without_answer']} updates: check the transcripts; the questions are "
                "too hard, responses are cut off, or loop.rewards does not recognize the form of the answers"
            )
        if wanted.zero_variance_updates is not None and seen["equal"] >= wanted.zero_variance_updates:
            found["groups"] = (
                f"in {seen['equal']} updates every group had equal rewards, so the policy learns nothing; use harder "
                "or easier questions, or raise loop.group_size or loop.temperature"
            )
        if wanted.staleness_above is not None and values.get("staleness_mean", 0) > wanted.staleness_above:
            found["staleness"] = (
                f"tokens are {values['staleness_mean']:.1f} updates old on average; lower loop.async_depth or "
                "loop.updates_per_rollout"
            )
        if wanted.clip_fraction_above is not None and values.get("clip_fraction", 0) > wanted.clip_fraction_above:
            found["clip_fraction"] = (
                f"{values['clip_fraction']:.0%} of the ratios are clipped, so their samples teach nothing; lower "
                "optimizer.lr, loop.async_depth or loop.updates_per_rollout"
            )
        size, least = values.get("rollout_is_eff_sample_size", 1.0), wanted.effective_sample_size_below
        if least is not None and size < least:
            found["effective_sample_size"] = (
                f"the effective sample size is {size:.0%} of the tokens: the policy that learns is far from the one "
                "that samples; lower loop.async_depth or optimizer.lr, or set loop.rollout_correction"
            )
        new = [name for name in found if name not in seen["told"]]
        over = [name for name in seen.get("lasting", ()) if name not in found]
        seen["told"] = [*seen["told"], *new]
        seen["lasting"] = [name for name in [*seen.get("lasting", ()), *new] if name not in over]
        return {name: found[name] for name in new} | dict.fromkeys(over, "")


@dataclass(frozen=True)
class _PendingUpdate:
    """An update that the devices may still be computing, and the inputs of its metric line."""

    progress: Progress
    metrics: dict[str, jax.Array]
    batch: Batch
    rollout_metrics: dict[str, float]
    diagnose: Callable[[], None]


class Telemetry:
    """Metrics of one process's updates. All processes call every method, in the same order.

    Attributes:
        stopwatch: splits up the time between two lines.
        tokens: drawn and trained on since the last line.
        costs: seconds to log once, with the next line.
        skipped: how many rows of the data are not used, by the reason's name.
        phases: where the time of the run goes.
    """

    def __init__(self, experiment: RunFile, loop: GrpoLoop, log: MetricsLogger, batches: BatchCheck) -> None:
        """Create it for a run. batches: counts what every update trains on."""
        self._experiment, self._loop, self._log, self._batches = experiment, loop, log, batches
        self._averages, self._alerts = MetricAverages(), AlertMonitor(loop.alerts, loop.steps)
        self._pending: _PendingUpdate | None = None
        self._last_logged_step = 0
        self._pace_logged = False
        self.stopwatch = throughput.Stopwatch("rollout_time", "reward_time", "score_time", "update_time")
        self.tokens = {"rollout": 0, "update": 0}
        self.costs: dict[str, float] = {}
        self.skipped: dict[str, int] = {}
        self.phases = log.phases

    def to_json(self) -> dict[str, Any]:
        """Return the telemetry as a checkpoint stores it, after a `flush`."""
        return {"window": self._averages.to_json(), "alerts": self._alerts.state}

    def restore(self, body: dict[str, Any]) -> None:
        """Continue from the `to_json` of an earlier run."""
        self._averages, self._alerts.state = MetricAverages.from_json(body["window"]), body["alerts"]

    def resume(self, step: int) -> None:
        self._last_logged_step = step
        self._log.resume(step)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time so far from the next line."""
        self.stopwatch.lap(1)

    def record(
        self,
        progress: Progress,
        metrics: dict[str, jax.Array],
        batch: Batch,
        rollout_metrics: dict[str, float],
        diagnose: Callable[[], None],
    ) -> None:
        """Record an update; it is logged once the next one is running, so recording never waits for the devices.

        rollout_metrics: of the update's rollout; empty in the warm start. diagnose: called if the update is not finite;
        raises CorruptionError if hardware is to blame.
        """
        self._batches.count(batch)
        self.flush()
        self._pending = _PendingUpdate(replace(progress), metrics, batch, rollout_metrics, diagnose)

    def flush(self) -> None:
        """Wait for the pending update and log it. Raises DivergedError if a non-finite loss ends the run."""
        if self._pending is None:
            return
        last, self._pending = self._pending, None
        progress, step = last.progress, last.progress.total_steps
        with self.stopwatch.measure("update_time"):
            check_finite(step, last.metrics, last.batch, self._experiment, lambda _: last.diagnose())
            values = {name: float(value) for name, value in jax.device_get(last.metrics).items()} | last.rollout_metrics
        self._averages.add(values)
        self.tokens["update"] += int(last.batch["mask"].sum())
        if last.rollout_metrics:
            self._log_alerts(progress.steps, step, values)
        if progress.steps == 1 and last.rollout_metrics:
            startup_report.log_on_main(*startup_report.check_first_update(values, self._loop))
        if step % self._experiment.logging.log_interval == 0 or progress.steps == self._loop.steps:
            self._log_line(progress)

    def end_phase(self, progress: Progress) -> None:
        """Write the last metric line of the warm start, whose metrics differ from those of GRPO."""
        self.flush()
        if not self._averages.is_empty:
            self._log_line(progress)

    def left_out(self, progress: Progress) -> dict[str, int]:
        """Return what the data and the warm start have left out so far, by the reason's name."""
        name = "solutions_left_out"
        overlong = self.skipped.get(name, 0) + progress.solutions_left_out
        return self.skipped | ({name: overlong} if overlong else {})

    def _log_alerts(self, step: int, total_step: int, values: dict[str, float]) -> None:
        changes = self._alerts.check(step, values)
        startup_report.log_on_main(*(f"ALERT after update {step}: {said}" for said in changes.values() if said))
        for name, message in changes.items():
            self._log.log_alert(total_step, name, message)

    def _log_line(self, progress: Progress) -> None:
        """Write a metric line for the updates since the last one."""
        count, self._last_logged_step = max(1, progress.total_steps - self._last_logged_step), progress.total_steps
        times = self.stopwatch.lap(count)
        times["other_time"] = 2 * times["step_time"] - sum(times.values())
        spent = {"rollout": times["rollout_time"], "update": times["update_time"]}
        rates = {
            f"{name.replace('update', 'train')}_tokens_per_second": tokens / count / spent[name]
            for name, tokens in self.tokens.items()
            if spent[name]
        }
        rates["tokens_per_second"] = self.tokens["update"] / count / times["step_time"]
        self.tokens = dict.fromkeys(self.tokens, 0)
        warm_steps_left = self._loop.warm_start_steps - progress.warm_steps if progress.phase == "warm_start" else 0
        steps_left = self._loop.steps - progress.steps
        values = self._averages.pop() | times | rates | throughput.device_memory() | self.costs
        self.costs = {}
        values |= self.left_out(progress)
        steps_total = progress.total_steps + warm_steps_left + steps_left
        self._log.log(progress.total_steps, progress.phase, **values, steps_total=steps_total)
        if progress.phase == "grpo" and not self._pace_logged:
            self._pace_logged = True
            startup_report.log_on_main(startup_report.time_report(values, steps_left))

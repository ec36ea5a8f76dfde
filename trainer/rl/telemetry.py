"""Metrics of GRPO updates: averages between two metric lines, times, rates and alerts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
from trainer.distributed.batch import Batch
from trainer.rl.progress import Progress
from trainer.step.batch_check import BatchCheck
from trainer.step.nan_check import check_finite
from trainer.telemetry import startup_report, throughput
from trainer.telemetry.alerts import AlertMonitor
from trainer.telemetry.averages import MetricAverages
from trainer.telemetry.metrics import MetricsLogger


@dataclass(frozen=True)
class _PendingUpdate:
    """An update that the devices may still be computing, and the inputs of its metric line."""

    progress: Progress
    metrics: dict[str, jax.Array]
    batch: Batch
    rollout_metrics: dict[str, float]


class Telemetry:
    """Metrics of one process's updates. All processes call every method, in the same order.

    Attributes:
        stopwatch: splits up the time between two lines.
        tokens: drawn and trained on since the last line.
        costs: seconds to log once, with the next line.
        phases: where the time of the run goes.
    """

    def __init__(
        self, experiment: RunFile, loop: GrpoLoop, log: MetricsLogger, batches: BatchCheck, diagnose: Callable[[], None]
    ) -> None:
        """Create it for a run.

        batches: counts what every update trains on. diagnose: called for an update that is not finite; raises
        CorruptionError if hardware is to blame.
        """
        self._experiment, self._loop, self._log = experiment, loop, log
        self._batches, self._diagnose = batches, diagnose
        self._averages, self._alerts = MetricAverages(), AlertMonitor(loop.alerts, loop.steps)
        self._pending: _PendingUpdate | None = None
        self._last_logged_step = 0
        self._pace_logged = False
        self.stopwatch = throughput.Stopwatch("rollout_time", "reward_time", "score_time", "update_time")
        self.tokens = {"rollout": 0, "update": 0}
        self.costs: dict[str, float] = {}
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
        self, progress: Progress, metrics: dict[str, jax.Array], batch: Batch, rollout_metrics: dict[str, float]
    ) -> None:
        """Record an update; it is logged once the next one is running, so recording never waits for the devices.

        rollout_metrics: of the update's rollout; empty in the warm start.
        """
        self._batches.count(batch)
        self.flush()
        self._pending = _PendingUpdate(replace(progress), metrics, batch, rollout_metrics)

    def flush(self) -> None:
        """Wait for the pending update and log it. Raises DivergedError if a non-finite loss ends the run."""
        if self._pending is None:
            return
        last, self._pending = self._pending, None
        progress, step = last.progress, last.progress.total_steps
        with self.stopwatch.measure("update_time"):
            check_finite(step, last.metrics, last.batch, self._experiment, lambda _: self._diagnose())
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

    def upload(self) -> None:
        """Copy the metrics to the run's folder."""
        self._log.upload()

    def _log_alerts(self, step: int, total_step: int, values: dict[str, float]) -> None:
        changes = self._alerts.check(step, values)
        if said := [f"ALERT after update {step}: {change.message}" for change in changes if change.message]:
            startup_report.log_on_main(*said)
            self._log.log_text(step, "alerts", "\n\n".join(said))
        for change in changes:
            self._log.log_alert(total_step, change.name, change.message)

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
        steps_total = progress.total_steps + warm_steps_left + steps_left
        self._log.log(progress.total_steps, progress.phase, **values, steps_total=steps_total)
        if progress.phase == "grpo" and not self._pace_logged:
            self._pace_logged = True
            startup_report.log_on_main(startup_report.time_report(values, steps_left))

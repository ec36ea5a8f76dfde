"""The contents of a report as values: the page shows them, `--json` prints them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from controller.report.curves import select_metrics
from controller.report.gather import Metric, RecordedRun
from controller.report.settings import Asked, Setting, group_by_hypothesis
from controller.report.stats import Comparison, compare, summarize
from controller.report.timeline import Timeline, build_timeline


@dataclass(frozen=True)
class ReportModel:
    """Contents of a report: settings (baseline first), metrics in page order, timelines by run id, what was asked."""

    name: str
    settings: tuple[Setting, ...]
    metrics: tuple[Metric, ...]
    omitted_metrics: int
    times: dict[str, Timeline]
    asked: Asked | None = None

    @property
    def runs(self) -> list[RecordedRun]:
        return [run for setting in self.settings for run in setting.runs]

    @property
    def superseded_runs(self) -> list[RecordedRun]:
        return [run for setting in self.settings for run in setting.superseded_runs]

    def setting_of(self, run: RecordedRun) -> Setting:
        return self._setting_by_run[run.id]

    @cached_property
    def _setting_by_run(self) -> dict[str, Setting]:
        return {run.id: setting for setting in self.settings for run in (*setting.runs, *setting.superseded_runs)}

    def run_label(self, run: RecordedRun) -> str:
        label = self.setting_of(run).label
        return label if run.seed is None else f"{label} seed {run.seed}"

    def comparisons(self, metric: Metric) -> list[Comparison]:
        """Compare each setting with the baseline, which comes first, by the last value of each run."""
        values = [final_values_by_seed(setting, metric) for setting in self.settings]
        return [summarize(values[0]), *(compare(one, values[0]) for one in values[1:])]

    def interrupted_steps(self, metric: Metric) -> list[tuple[float, str]]:
        """Return the last step before each interruption of the runs that have the metric, with what happened."""
        return [
            (max((line.step for line in run.lines if line.time <= mark.time), default=0.0), mark.message)
            for run in self.runs
            if metric in run.curves
            for mark in self.times[run.id].interruptions
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document; times in seconds."""
        return {
            "name": self.name,
            "baseline": self.settings[0].label,
            "hypothesis": self.asked and {**self.asked.hypothesis.model_dump(), "misfits": [*self.asked.misfits]},
            "metrics": [self._metric_json(metric) for metric in self.metrics],
            "runs": [self._run_json(run) for run in self.runs],
            "left_out": [run.id for run in self.superseded_runs],
        }

    def _metric_json(self, metric: Metric) -> dict[str, Any]:
        rows = zip(self.settings, self.comparisons(metric), strict=True)
        found = [{"setting": s.label, "values": final_values_by_seed(s, metric), **vars(one)} for s, one in rows]
        return {"phase": metric[0], "name": metric[1], "settings": found}

    def _run_json(self, run: RecordedRun) -> dict[str, Any]:
        time = self.times[run.id]
        spans = {kind: round(time.seconds_of(kind), 3) for kind in dict.fromkeys(span.kind for span in time.spans)}
        money = {"pod_hours": time.pod_hours, "usd": time.usd, "goodput": time.goodput}
        return (
            {"run": run.id, "label": self.run_label(run), "state": run.state, "seconds": spans}
            | money
            | {"alerts": [vars(alert) for alert in time.alerts]}
        )


def build_report(name: str, runs: Sequence[RecordedRun], baseline: str = "") -> ReportModel:
    """Build the report of at least one run. Raises ConfigError as `group_settings` does."""
    found, asked = group_by_hypothesis(name, runs, baseline)
    sought = next((metric for run in runs if (metric := _search_metric(run))), asked.hypothesis.metric if asked else "")
    metrics, further = select_metrics(found, sought)
    times = {run.id: build_timeline(run) for run in runs}
    return ReportModel(name, tuple(found), tuple(metrics), further, times, asked)


def final_values_by_seed(setting: Setting, metric: Metric) -> dict[Any, float]:
    """Return the last finite value of each run by seed, or by run where no seed is recorded."""
    last = {run.id if run.seed is None else run.seed: run.last_value(metric) for run in setting.counted_runs}
    return {seed: value for seed, value in last.items() if value is not None}


def _search_metric(run: RecordedRun) -> str:
    config = (run.record or {}).get("config")
    search = (config.get("sweep") or {}).get("search") if isinstance(config, dict) else None
    return str(search.get("metric", "")) if isinstance(search, dict) else ""

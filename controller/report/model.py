"""All that a report tells, as values: the page shows them, `--json` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from controller.report.curves import metrics_of
from controller.report.gather import Metric, Run
from controller.report.settings import Setting, settings
from controller.report.stats import Compared, alone, compared
from controller.report.timeline import Timeline, timeline


@dataclass(frozen=True)
class Study:
    """Settings, the baseline first; metrics, as they are offered, and how many were left out; times: by run."""

    name: str
    settings: tuple[Setting, ...]
    metrics: tuple[Metric, ...]
    further_metrics: int
    times: dict[str, Timeline]

    @property
    def runs(self) -> list[Run]:
        """Those that count, by setting."""
        return [run for setting in self.settings for run in setting.runs]

    @property
    def left_out(self) -> list[Run]:
        return [run for setting in self.settings for run in setting.left_out]

    def setting(self, run: Run) -> Setting:
        """That of a run."""
        return self._by_run[run.id]

    @cached_property
    def _by_run(self) -> dict[str, Setting]:
        return {run.id: setting for setting in self.settings for run in (*setting.runs, *setting.left_out)}

    def label(self, run: Run) -> str:
        """Setting and seed."""
        label = self.setting(run).label
        return label if run.seed is None else f"{label} seed {run.seed}"

    def table(self, metric: Metric) -> list[Compared]:
        """Each setting beside the baseline, which comes first, by the last value of each run."""
        values = [values_of(setting, metric) for setting in self.settings]
        return [alone(values[0]), *(compared(one, values[0]) for one in values[1:])]

    def as_document(self) -> dict[str, Any]:
        """For programs; times in seconds."""
        return {
            "name": self.name,
            "baseline": self.settings[0].label,
            "metrics": [self._metric(metric) for metric in self.metrics],
            "runs": [self._run(run) for run in self.runs],
            "left_out": [run.id for run in self.left_out],
        }

    def _metric(self, metric: Metric) -> dict[str, Any]:
        rows = zip(self.settings, self.table(metric), strict=True)
        found = [{"setting": s.label, "values": values_of(s, metric), **vars(one)} for s, one in rows]
        return {"phase": metric[0], "name": metric[1], "settings": found}

    def _run(self, run: Run) -> dict[str, Any]:
        time = self.times[run.id]
        spans = {kind: round(time.of(kind), 3) for kind in dict.fromkeys(span.kind for span in time.spans)}
        money = {"pod_hours": time.pod_hours, "usd": time.usd, "goodput": time.goodput}
        return {"run": run.id, "label": self.label(run), "state": run.state, "seconds": spans} | money


def study(name: str, runs: Sequence[Run], baseline: str = "") -> Study:
    """Of at least one run.

    Raises:
        ConfigError: see `settings`.
    """
    found = tuple(settings(runs, baseline))
    sought = next((metric for run in runs if (metric := _sought(run))), "")
    metrics, further = metrics_of(found, sought)
    return Study(name, found, tuple(metrics), further, {run.id: timeline(run) for run in runs})


def values_of(setting: Setting, metric: Metric) -> dict[Any, float]:
    """By seed (by run where none is on record) the last value of each run, where it is finite."""
    last = {run.id if run.seed is None else run.seed: run.last(metric) for run in setting.counted}
    return {seed: value for seed, value in last.items() if value is not None}


def _sought(run: Run) -> str:
    """The metric that a search was for."""
    config = (run.record or {}).get("config")
    search = (config.get("sweep") or {}).get("search") if isinstance(config, dict) else None
    return str(search.get("metric", "")) if isinstance(search, dict) else ""

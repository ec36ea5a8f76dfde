"""A metric against a number of the config, cost or results: fit, Pareto front, time to a level; and their section."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any
from xml.etree.ElementTree import Element

from conf.schema.config import Config
from conf.schema.validation import validate
from controller.checks.fit import estimate_num_params
from controller.core.errors import ConfigError
from controller.core.text import plural
from controller.records.table import flat
from controller.report.comparison import Comparison, Setting, compare, summarize
from controller.report.contents import ReportModel, Timeline, final_values_by_seed
from controller.report.curves import Curve
from controller.report.drawing import add_table, add_text, difference_cells, draw_chart, format_duration, format_number
from controller.report.gather import Metric, RecordedRun
from controller.report.power_law import MIN_LEVELS, SAMPLES, PowerLaw, fit_power_law
from controller.run.estimate import estimate_flops

LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "gap", "seconds", "usd")
"""Parts of the names of metrics of which less is better."""
MAX_CHOICES = 12


@dataclass(frozen=True)
class Reached:
    """When a run reached the level for the first time: updates, and seconds of training, without interruptions."""

    steps: float
    seconds: float


@dataclass(frozen=True)
class ScalingRow:
    """One setting: x and y are means over its runs; `reached` has those that reached the level, of `compared.n`."""

    setting: Setting
    x: float
    compared: Comparison
    on_front: bool
    reached: tuple[Reached, ...]


@dataclass(frozen=True)
class Scaling:
    """Points are (x, y) of the runs. Intervals of differences hold for all settings together."""

    x_name: str
    metric: Metric
    rows: tuple[ScalingRow, ...]
    points: tuple[tuple[float, float], ...]
    left_out: int
    fit: PowerLaw | None
    level: float | None

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"setting": row.setting.label, "x": row.x, **vars(row.compared), "pareto": row.on_front}
            | {"reached": [vars(one) for one in row.reached]}
            for row in self.rows
        ]
        head = {"x": self.x_name, "phase": self.metric[0], "metric": self.metric[1], "level": self.level}
        return {**head, "left_out": self.left_out, "settings": rows, "fit": self.fit and asdict(self.fit)}


def measure_scaling(report: ReportModel, x: str, y: str = "", fit: str = "", level: float | None = None) -> Scaling:
    """Relate a metric, the report's first one by default, to x: see docs/report.md for its names.

    Raises ConfigError if no run has x or y, or there are too few different values of x for the fit.
    """
    metric = _find_metric(report, y)
    found, points, left_out = [], [], 0
    for setting in report.settings:
        values = final_values_by_seed(setting, metric)
        pairs = [(_number(report, run, x), run.last_value(metric)) for run in setting.counted_runs]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        left_out += len(pairs) - len(known)
        points += known
        if known and values:
            found.append((setting, fmean(a for a, _ in known), values))
    if not points:
        choices = ", ".join(_choices(report)[:MAX_CHOICES])
        raise ConfigError(f"--x {x}: no run has this number and {metric[1]}; there are {choices} and others")
    lower = any(part in metric[1] for part in LOWER_IS_BETTER)
    compared = _comparisons([values for _, _, values in found])
    means = [(at, fmean(values.values())) for _, at, values in found]
    rows = [
        ScalingRow(setting, at, one, is_on_front(mean, means, lower), _reached(report, setting, metric, level, lower))
        for (setting, at, _), one, mean in zip(found, compared, means, strict=True)
    ]
    fitted = _fit(points, x) if fit else None
    return Scaling(x, metric, tuple(sorted(rows, key=lambda row: row.x)), tuple(points), left_out, fitted, level)


def is_on_front(point: tuple[float, float], points: Sequence[tuple[float, float]], lower: bool) -> bool:
    """Return whether no other point has both less x and a better y, or one of them at an equal other."""
    sign = -1 if lower else 1
    return not any(x <= point[0] and sign * y >= sign * point[1] and (x, y) != point for x, y in points)


def _comparisons(values: Sequence[Mapping[Any, float]]) -> list[Comparison]:
    """Compare each with the first, at intervals that hold together."""
    count = max(1, len(values) - 1)
    return [summarize(values[0]), *(compare(one, values[0], count) for one in values[1:])]


def _fit(points: Sequence[tuple[float, float]], x: str) -> PowerLaw:
    levels = sorted({at for at, _ in points})
    if len(levels) < MIN_LEVELS:
        shown = ", ".join(f"{at:g}" for at in levels)
        raise ConfigError(f"--fit power: needs {MIN_LEVELS} different values of {x}; the runs have {shown}")
    if levels[0] <= 0:
        raise ConfigError(f"--fit power: needs {x} > 0; a run has {levels[0]:g}")
    return fit_power_law([at for at, _ in points], [y for _, y in points])


def _find_metric(report: ReportModel, name: str) -> Metric:
    if not report.metrics:
        raise ConfigError("--x: no run has metrics.jsonl or summary.json")
    wanted = (metric for metric in report.metrics if name in ("", metric[1], "/".join(metric)))
    if (found := next(wanted, None)) is None:
        shown = ", ".join(metric[1] for metric in report.metrics[:MAX_CHOICES])
        raise ConfigError(f"--y {name}: no run has this metric; there are {shown}")
    return found


def _reached(
    report: ReportModel, setting: Setting, metric: Metric, level: float | None, lower: bool
) -> tuple[Reached, ...]:
    found: list[Reached] = []
    if level is None:
        return ()
    for run in setting.counted_runs:
        curve = run.curves.get(metric, {})
        steps = [step for step, y in curve.items() if y is not None and (y <= level if lower else y >= level)]
        if steps:
            at = next((line.time for line in run.lines if line.step >= min(steps)), None)
            found.append(Reached(min(steps), training_seconds(report.times[run.id], at)))
    return tuple(found)


def training_seconds(time: Timeline, until: float | None = None) -> float:
    """Return the seconds of training that counted, up to a time."""
    end = float("inf") if until is None else until
    return sum(max(0.0, min(span.end, end) - span.start) for span in time.spans if span.kind == "training")


RUN_NUMBERS: Mapping[str, Callable[[RecordedRun, Timeline, Config | None], float | None]] = {
    "params": lambda run, time, config: config and config.model and estimate_num_params(config.model),
    "flops": lambda run, time, config: config and estimate_flops(config),
    "seconds": lambda run, time, config: training_seconds(time) or None,
    "steps": lambda run, time, config: max((line.step for line in run.lines), default=None),
    "examples": lambda run, time, config: _examples(run, config),
    "pod_hours": lambda run, time, config: time.pod_hours,
    "usd": lambda run, time, config: time.usd,
}
"""Numbers of a run by the name for --x. A result of its summary.json of the same name comes first."""


def _examples(run: RecordedRun, config: Config | None) -> float | None:
    batch = getattr(config and config.loop, "rows", None)
    return batch and max((line.step * batch for line in run.lines), default=None)


def _number(report: ReportModel, run: RecordedRun, name: str) -> float | None:
    """Return a result, one of RUN_NUMBERS, a key of the config (or its unique end), or a metric's last value."""
    if (value := run.last_value(("result", name))) is not None:
        return value
    raw = (run.record or {}).get("config")
    if name in RUN_NUMBERS:
        config = validate(raw)[0] if isinstance(raw, dict) else None
        value = RUN_NUMBERS[name](run, report.times[run.id], config)
        return None if value is None else float(value)
    keys = flat({key: raw[key] for key in raw if key != "sweep"}) if isinstance(raw, dict) else {}
    if len(ends := [key for key in keys if key == name or key.endswith(f".{name}")]) > 1 and name not in keys:
        raise ConfigError(f"--x {name}: which one: {', '.join(ends[:MAX_CHOICES])}")
    value = keys.get(name if name in keys else ends[0]) if ends else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return next((run.last_value(metric) for metric in run.curves if metric[1] == name), None)


def _choices(report: ReportModel) -> list[str]:
    config = flat((report.runs[0].record or {}).get("config") or {})
    words = {key.partition("=")[0].lstrip("+") for run in report.runs for key in run.overrides}
    varied = sorted(key for key in words if isinstance(config.get(key), int | float))
    return [*RUN_NUMBERS, *varied, *(name for phase, name in report.metrics if phase == "result")]


LOGARITHMIC_FROM = 4.0
"""Ratio of the largest to the smallest x from which the axis is logarithmic."""


def scaling_lines(scaling: Scaling) -> list[str]:
    """Return what a terminal shows: the fit, the Pareto front, who reached the level."""
    front = ", ".join(
        f"{format_number(row.x)}: {format_number(row.compared.mean, by=row.compared.deviation)}"
        for row in scaling.rows
        if row.on_front
    )
    lines = [
        f"{scaling.metric[1]} against {scaling.x_name}: {plural(len(scaling.points), 'run')}; Pareto front {front}"
    ]
    if scaling.fit:
        lines += [f"  {line}" for line in fit_lines(scaling.fit)]
    if scaling.level is not None:
        reached = [f"{format_number(row.x)}: {_reached_text(row)}" for row in scaling.rows]
        lines.append(f"  reached {scaling.level:g} at {'; '.join(reached)}")
    if scaling.left_out:
        lines.append(f"  left out: {plural(scaling.left_out, 'run')} without {scaling.x_name} or {scaling.metric[1]}")
    return lines


def fit_lines(fit: PowerLaw) -> list[str]:
    """Return the fit and its intervals in words."""
    sign, size = ("-", fit.b) if fit.b >= 0 else ("+", -fit.b)
    intervals = ", ".join(
        f"{name} {format_number(low)} to {format_number(high)}"
        for name, (low, high) in (("a", fit.a_interval), ("b", fit.b_interval), ("c", fit.c_interval))
    )
    lines = [
        f"y = {fit.a:.4g} {sign} {size:.4g} x^-{fit.c:.4g}, residual {fit.deviation:.2g}, {fit.points} runs",
        f"95 %: {intervals} ({SAMPLES:,} bootstrap samples)",
    ]
    if fit.is_open:
        lines.append("the exponent's interval reaches the end of the search: these runs do not determine it")
    return lines


def scaling_section(section: Element, scaling: Scaling, report: ReportModel) -> None:
    """Add the chart, the fit in words and the table."""
    xs, ys = zip(*scaling.points, strict=True)
    curves = {0: ("fit", Curve(*zip(*scaling.fit.curve, strict=True)))} if scaling.fit else {}
    heights = [*ys, *(value for _, curve in curves.values() for value in curve.mean)]
    label = f"{scaling.metric[1]} against {scaling.x_name}; the table below has the means"
    logarithmic = min(xs) > 0 and max(xs) / min(xs) >= LOGARITHMIC_FROM
    draw_chart(section, label, xs, heights, curves, logarithmic=logarithmic, points=scaling.points)
    for line in fit_lines(scaling.fit) if scaling.fit else ():
        add_text(section, line)
    level = () if scaling.level is None else (f"reached {scaling.level:g}",)
    head = ["setting", f"#{scaling.x_name}", "#seeds", "#mean", "#± std", "#difference", "95 % interval", "how"]
    rows = [[*_cells(row), *((_reached_text(row),) if level else ())] for row in scaling.rows]
    add_table(section, f"{scaling.metric[1]} against {scaling.x_name}", [*head, "Pareto front", *level], rows)
    add_text(
        section,
        f"Differences are to {report.settings[0].label}. Their intervals hold for all settings together (Bonferroni). "
        "A setting is on the Pareto front if no other has less x and a better mean. Times are of training, without "
        "interruptions.",
        class_="soft",
    )
    if scaling.left_out:
        add_text(section, f"Left out, without such a number: {plural(scaling.left_out, 'run')}.", class_="soft")


def _cells(row: ScalingRow) -> list[object]:
    one = row.compared
    mean, deviation = (format_number(value, by=one.deviation) for value in (one.mean, one.deviation))
    compared = [*difference_cells(one), one.how] if one.how else ["baseline", "", ""]
    return [row.setting.label, format_number(row.x), one.n, mean, deviation, *compared, "yes" if row.on_front else "–"]


def _reached_text(row: ScalingRow) -> str:
    """Return `step 1,200, 12.3 min (2 of 3)`: means over the runs that reached the level."""
    if not row.reached:
        return "never"
    steps, seconds = (fmean(getattr(one, name) for one in row.reached) for name in ("steps", "seconds"))
    return f"step {steps:,.0f}, {format_duration(seconds)} ({len(row.reached)} of {row.compared.n})"

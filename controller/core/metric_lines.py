"""Lines about a run's metrics: the training line, an evaluation, and the results at the end."""

import re
from collections.abc import Mapping
from typing import Any

from controller.core.layout import join_fitting, pad, wrap

MAX_NUMBER = 1e15
"""Upper limit for step counts and seconds; JSON numbers are unbounded."""
SHOWN_METRICS = ("loss", "accuracy", "exact_accuracy", "reward_mean", "pass_at_k", "entropy", "kl")
RANKS = {
    "accuracy": 1, "exact_accuracy": 1, "reward_mean": 2, "tok/s": 3, "loss": 4, "pass_at_k": 5, "kl": 6, "entropy": 7,
}  # fmt: skip
"""The highest rank is left out first where the line has no room; step and ETA always stay."""
BESIDE_OTHERS = re.compile(r"(^|_)(low|high|stderr)(_|$)|^(eval_prompts|eval_puzzles|steps|warm_start_steps)$")
"""Bounds of an interval, which are shown beside their value, and numbers that the config says."""
RESULT_NAME_WIDTH = 18


def training_line(metrics: dict[str, Any], usd_per_hour: float | None = None, width: int | None = None) -> str | None:
    """Format `step 120/700  loss 0.12  accuracy 0.61  1.2k tok/s  ETA 1:32, $0.65`; None for a line without a step.

    The dollars are the remaining cost, shown if the hourly price of the pod is known. Where the line is wider than
    `width`, the least important metrics are left out.
    """
    metrics = {name: value for name, value in metrics.items() if isinstance(value, str | int | float)}
    step, total, seconds = (numeric(metrics.get(name)) for name in ("step", "steps_total", "step_time"))
    if step is None:
        return None
    first = f"{metrics.get('phase', '')} step {step}{f'/{total:.0f}' if total else ''}".strip()
    values = {name: metrics[name] for name in SHOWN_METRICS if metrics.get(name) is not None}
    if "accuracy" not in values and "reward_mean" not in values and "loss" in values:
        ranks = RANKS | {"loss": 1}
    else:
        ranks = RANKS
    parts = [(ranks[name], f"{name} {format_number(value)}") for name, value in values.items()]
    if numeric(metrics.get("tokens_per_second")):
        parts.append((ranks["tok/s"], f"{format_number(metrics['tokens_per_second'])} tok/s"))
    if numeric(metrics.get("examples_per_second")):
        parts.append((ranks["tok/s"], f"{format_number(metrics['examples_per_second'])} examples/s"))
    if total and seconds:
        left = max(0.0, total - step) * seconds
        dollars = f", ${left / 3600 * usd_per_hour:,.2f}" if usd_per_hour else ""
        parts.append((0, f"ETA {format_duration(left)}{dollars}"))
    return join_fitting(first, parts, width)


def evaluation_line(metrics: dict[str, Any]) -> str:
    """Format `step 188  accuracy 0.8984 (95 %: 0.8553 to 0.9297)`: the metrics of an evaluation, no parts."""
    values = {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")}
    values.pop("time", None)
    shown = []
    for name, value in values.items():
        if "/" not in name and not _is_bound(values, name):
            shown.append(f"{name} {format_number(value)}{_interval(values, f'{name}_low', f'{name}_high')}")
    return "  ".join([f"step {numeric(metrics.get('step'))}", *shown])


def result_lines(summary: Mapping[str, Any], width: int | None = None) -> list[str]:
    """Format the content of summary.json: before and after on one line with the interval, then the other values.

    `X_before` and `X_after` make one line; `X_low_after` and `X_high_after` are its 95% interval. Numbers without a
    counterpart share lines, in the order in which the program gave them. If nothing has a before and after, each value
    has its line, with `X_low` and `X_high` as its interval.
    """
    lines, others = [], {}
    for name, value in summary.items():
        base = name.removesuffix("_after")
        if name.endswith("_after") and f"{base}_before" in summary and not BESIDE_OTHERS.search(base):
            interval = _interval(summary, f"{base}_low_after", f"{base}_high_after")
            before = format_number(summary[f"{base}_before"])
            lines.append(f"{pad(base, RESULT_NAME_WIDTH)} {before} → {format_number(value)}{interval}")
        elif not (_has_counterpart(summary, name) or BESIDE_OTHERS.search(name)):
            others[name] = value
    if not lines:
        return [
            f"{pad(name, RESULT_NAME_WIDTH)} {format_number(value)}{_interval(summary, f'{name}_low', f'{name}_high')}"
            for name, value in summary.items()
            if not _is_bound(summary, name)
        ]
    rest = "  ".join(f"{name} {format_number(value)}".replace(" ", "\0") for name, value in others.items())
    return [*lines, *wrap(rest, width).replace("\0", " ").splitlines()]


def _has_counterpart(summary: Mapping[str, Any], name: str) -> bool:
    """Return whether the line of another name shows this one: `X_before` beside `X_after`."""
    return name.endswith("_before") and f"{name.removesuffix('_before')}_after" in summary


def _is_bound(values: Mapping[str, Any], name: str) -> bool:
    """Return whether a value is a bound of another's interval, or its standard error: `X_low` beside `X`."""
    base = name.rpartition("_")[0]
    return name.endswith(("_low", "_high", "_stderr")) and {base, f"{base}_low", f"{base}_high"} <= values.keys()


def _interval(values: Mapping[str, Any], low: str, high: str) -> str:
    if low not in values or high not in values:
        return ""
    return f" (95 %: {format_number(values[low])} to {format_number(values[high])})"


def numeric(value: Any) -> int | float | None:
    """Return the value if it is a number: a program may write anything as its metrics."""
    return value if isinstance(value, int | float) and abs(value) < MAX_NUMBER else None


def format_number(value: Any) -> str:
    if not isinstance(value, float) or value.is_integer():
        return f"{value:,.0f}" if isinstance(value, float) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

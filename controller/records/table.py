"""Table of runs: filter, sort and format the rows, for people and for programs."""

import csv
import io
import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from controller.core.errors import ConfigError
from controller.records.index import RunRow

CONDITION = re.compile(r"^(?P<key>[\w.]+?)\s*(?P<sign>!=|>=|<=|=|>|<|~)\s*(?P<value>.*)$", re.DOTALL)
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda value, wanted: value == wanted,
    "!=": lambda value, wanted: value != wanted,
    ">": lambda value, wanted: value > wanted,
    "<": lambda value, wanted: value < wanted,
    ">=": lambda value, wanted: value >= wanted,
    "<=": lambda value, wanted: value <= wanted,
    "~": lambda value, wanted: str(wanted) in str(value),
}
PLAIN_COLUMNS = ("run", "state", "created", "seconds", "type", "attempts", "usd")
"""Displayed columns, before metrics and overrides."""
MAX_METRICS = 4
FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters of a text that a spreadsheet evaluates as a formula."""


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten `{"metrics": {"loss": 1}}` to `{"metrics.loss": 1}`; lists stay whole."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found.update(flat(item, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = item
    return found


def filter_rows(rows: Iterable[RunRow], conditions: Sequence[str], sort: str | None, last: int | None) -> list[RunRow]:
    """Return the flat rows that meet every condition.

    Args:
        rows: rows of the table.
        conditions: `state=finished`, `metrics.accuracy_after>=0.8`, `overrides~seed`.
        sort: a key; the largest value comes last, next to the prompt, and rows without the key come first.
        last: number of rows to keep, from the end.

    Raises:
        ConfigError: a condition cannot be parsed.
    """
    tests = [_parse_condition(condition) for condition in conditions]
    found = [row for row in map(flat, rows) if all(test(row) for test in tests)]
    if sort:
        found.sort(key=lambda row: _sort_key(row.get(sort)))
    return found[-last:] if last else found


def as_csv(rows: Sequence[RunRow]) -> str:
    """Return CSV with all keys of all rows as columns; a list is shell-quoted."""
    out = io.StringIO()
    writer = csv.writer(out)
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "pods"))
    writer.writerow(map(_csv_cell, keys))
    writer.writerows([_csv_cell(row.get(key)) for key in keys] for row in rows)
    return out.getvalue()


def format_table(rows: Sequence[RunRow]) -> list[str]:
    """Return the table for display, without the overrides that all runs share."""
    if not rows:
        return ["no runs"]
    shared = set.intersection(*(set(row.get("overrides") or ()) for row in rows)) if len(rows) > 1 else set()
    names = list(dict.fromkeys(key for row in rows for key in row if key.startswith("metrics.")))[:MAX_METRICS]
    head = [*PLAIN_COLUMNS, *(name.removeprefix("metrics.") for name in names), "words"]
    lines = [head]
    for row in rows:
        overrides = shlex.join(word for word in row.get("overrides") or () if word not in shared)
        lines.append(
            [
                *(_format_cell(key, row.get(key)) for key in PLAIN_COLUMNS),
                *(_format_cell(n, row.get(n)) for n in names),
                overrides,
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _parse_condition(condition: str) -> Callable[[RunRow], bool]:
    match = CONDITION.match(condition)
    if match is None:
        raise ConfigError(f"--where {condition}: expected KEY OPERATOR VALUE; operators: {' '.join(OPERATORS)}")
    key, judge, wanted = match["key"], OPERATORS[match["sign"]], _parse_number(match["value"])

    def test(row: RunRow) -> bool:
        value = row.get(key)
        if isinstance(value, int | float) != isinstance(wanted, int | float) and match["sign"] != "~":
            value = str(value)
            return match["sign"] in "!=" and judge(value, str(wanted))
        return value is not None and judge(value, wanted)

    return test


def _parse_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _sort_key(value: Any) -> tuple[int, float, str]:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return 0, 0.0, ""
    return (1, float(value), "") if isinstance(value, int | float) else (2, 0.0, str(value))


def _csv_cell(value: Any) -> Any:
    """Quote a text that a spreadsheet would run: https://owasp.org/www-community/attacks/CSV_Injection."""
    text = shlex.join(map(str, value)) if isinstance(value, list) else value
    if not isinstance(text, str) or not text.startswith(FORMULA_PREFIXES):
        return text
    if not isinstance(value, list):
        return f"'{text}"
    first, space, others = text.partition(" ")  # a shell reads the same words
    return f"'{first}'{space}{others}"


def _format_cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "created":
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M")
    if key == "usd":
        return f"{value:.2f}"
    if key == "seconds":
        return f"{value:.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""Table of runs: filter, sort, select and format the rows, for people and for programs; and compare two of them."""

import csv
import difflib
import io
import itertools
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from controller.core.errors import ConfigError
from controller.core.text import (
    BESIDE_OTHERS,
    GAP,
    Concession,
    fit_table,
    nearest_names,
    short_ids,
    short_overrides,
    wrap,
)
from controller.records.index import ID_PATTERN, RunRow

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
STATES = ("running", "finished", "failed", "cancelled")
PLAIN_COLUMNS = ("run", "program", "state", "created", "seconds", "type", "attempts", "usd")
"""Displayed columns, before metrics and overrides."""
OPTIONAL_COLUMNS = ("program", "usd", "seconds")
"""Columns that are not displayed if no run has a value."""
ROW_KEYS = frozenset(
    {*PLAIN_COLUMNS, "bucket", "cloud", "code", "commit", "ended", "name", "overrides", "pod_hours", "pods", "project"}
    | {"reason", "seed", "sweep", "zone"}
)
"""Keys that a row may have, besides its metrics."""
COMMAND = re.compile(r"program\.command=\[([^\[\]{}'\"\\]+)\]")
MAX_METRICS = 4
NUMBERS = ("metrics.", "seconds", "created", "ended", "attempts", "usd", "pod_hours", "seed")
"""Beginnings of the keys whose values are numbers."""
FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters of a text that a spreadsheet evaluates as a formula."""
GIT_KEYS = ("commit", "dirty")
MACHINE_KEYS = ("devices", "python", "image_fingerprint", "runtime_version")
RESULT_KEYS = ("state", "attempts", "seconds", "usd", "metrics")
RecordDiff = dict[str, dict[str, tuple[Any, Any]]]


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

    Raises ConfigError if a condition cannot be parsed, or no run has its key or the sort key.

    Args:
        rows: rows of the table.
        conditions: `state=finished`, `metrics.accuracy_after>=0.8`, `overrides~seed`.
        sort: a key; the largest value comes last, next to the prompt, and rows without the key come first.
        last: number of rows to keep, from the end.
    """
    every = [flat(row) for row in rows]
    keys = ROW_KEYS | {key for row in every for key in row} if every else None
    tests = [_parse_condition(condition, keys) for condition in conditions]
    if sort:
        _check_key(f"--sort {sort}", sort, keys)
    found = [row for row in every if all(test(row) for test in tests)]
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


def format_table(rows: Sequence[RunRow], width: int | None = None) -> list[str]:
    """Return the table for display, without the overrides that all runs share.

    What tells runs apart always stays: the hash of the id, the state and the overrides. Where a terminal of this width
    has no room for the rest, the last line names the columns that are not shown.
    """
    if not rows:
        return ["no runs"]
    shared = set.intersection(*(set(row.get("overrides") or ()) for row in rows)) if len(rows) > 1 else set()
    columns = {key: [_format_cell(key, row.get(key)) for row in rows] for key in PLAIN_COLUMNS}
    for key in OPTIONAL_COLUMNS:
        if all(row.get(key) is None for row in rows):
            del columns[key]
    # the first metrics of each program in turn, without bounds and constants of the config
    by_name: dict[str, dict[str, None]] = {}
    for row in rows:
        names = [key for key in row if key.startswith("metrics.") and not BESIDE_OTHERS.search(key[len("metrics.") :])]
        by_name.setdefault(str(row.get("name")), {}).update(dict.fromkeys(names))
    turns = itertools.zip_longest(*by_name.values())
    metrics = list(dict.fromkeys(name for turn in turns for name in turn if name))[:MAX_METRICS]
    columns |= {name.removeprefix("metrics."): [_format_cell(name, row.get(name)) for row in rows] for name in metrics}
    own = [[word for word in row.get("overrides") or () if word not in shared] for row in rows]
    own = [_of_command(words) for words in own]
    columns["overrides"] = [shlex.join(words) for words in own]
    titles, lines, left_out = fit_table(columns, width, _concessions(columns, metrics, own), folded="overrides")
    table = [GAP.join(cells).rstrip() for cells in [titles, *lines]]
    if left_out:
        table += wrap(f"not shown: {', '.join(left_out)}; --csv shows all", width, 2).splitlines()
    return table


def _of_command(words: Sequence[str]) -> list[str]:
    """Return overrides with the words of a command of the user's own as they were typed."""
    found: list[str] = []
    for word in words:
        listed = COMMAND.fullmatch(word)
        if listed:
            found += listed[1].split(",")
        elif word != "program=command":
            found.append(word)
    return found


def _concessions(
    columns: Mapping[str, Sequence[str]], metrics: Sequence[str], own: Sequence[Sequence[str]]
) -> list[Concession]:
    """Return what a narrow terminal shows in fewer columns or not at all, the least important first."""
    found: list[Concession] = [
        ("created", [when[5:] for when in columns["created"]]),  # without the year
        ("type", None),
        ("attempts", None),
        ("overrides", short_overrides([shlex.join(words) for words in own])),
        ("run", short_ids(columns["run"])),
        ("usd", None),
    ]
    ranked = [name.removeprefix("metrics.") for name in sorted(metrics, key=lambda name: name.endswith("_before"))]
    found += [(name, None) for name in reversed(ranked[1:])]
    return [*found, ("seconds", None), ("created", None), ("program", None), *((name, None) for name in ranked[:1])]


def _check_key(what: str, key: str, keys: Set[str] | None) -> None:
    """Raise ConfigError if no run has the key; `keys` is None if there are no runs."""
    if keys is not None and key not in keys:
        raise ConfigError(f"{what}: no run has the key {key}; closest: {nearest_names(key, keys)}")


def _parse_condition(condition: str, keys: Set[str] | None) -> Callable[[RunRow], bool]:
    match = CONDITION.match(condition)
    if match is None:
        raise ConfigError(
            f"--where {condition}: expected KEY OPERATOR VALUE; operators: {' '.join(OPERATORS)}; quote "
            "the condition, since a shell takes < and > for itself"
        )
    key, judge, wanted = match["key"], OPERATORS[match["sign"]], _parse_number(match["value"])
    if key == "state" and match["sign"] in ("=", "!=") and wanted not in STATES:
        raise ConfigError(f"--where {condition}: there is no state {wanted!r}; states: {', '.join(STATES)}")
    _check_key(f"--where {condition}", key, keys)
    if match["sign"] in ("<", ">", "<=", ">=") and isinstance(wanted, str) and key.startswith(NUMBERS):
        raise ConfigError(f"--where {condition}: {key} is a number, and {wanted!r} is none")

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


def diff_records(old: dict[str, Any], new: dict[str, Any]) -> RecordDiff:
    """Return the differing keys by section, each with both values, None if one run lacks the key.

    Each record carries its row of the table of runs under `row`. One that was written again after damage lacks what the
    launch knew of worker 0.
    """
    sections = {
        "config": lambda d: flat(d["config"]),
        "code": lambda d: {"sha256": d["code_sha256"], **{key: d.get("git", {}).get(key) for key in GIT_KEYS}},
        "packages": lambda d: d.get("worker_0", {}).get("packages", {}),
        "data": lambda d: {f"{asset['kind']} {asset['name']}": asset["identity"] for asset in d["assets"]},
        "machine": lambda d: flat({k: d.get("worker_0", {}).get(k) for k in MACHINE_KEYS}) | {"slipway": d["slipway"]},
        "price": lambda d: d.get("prices", {}),
        "result": lambda d: flat({key: d["row"].get(key) for key in RESULT_KEYS}),
    }
    found = {}
    for name, of in sections.items():
        a, b = of(old), of(new)
        found[name] = {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}
    return {name: unequal for name, unequal in found.items() if unequal}


def format_diff(old: str, new: str, found: RecordDiff) -> list[str]:
    lines = [f"- {old}", f"+ {new}"]
    for section, keys in found.items():
        lines += ["", section]
        for key, (a, b) in sorted(keys.items()):
            lines.append(f"  {key}: {'none' if a is None else a} -> {'none' if b is None else b}")
    return lines if found else [*lines, "", "no differences"]


def select_runs(
    rows: Sequence[RunRow],
    runs: Sequence[str] = (),
    sweep: str = "",
    where: Sequence[str] = (),
    sort: str | None = None,
    last: int | None = None,
    boards: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> tuple[str, list[RunRow]]:
    """Return a name for the selection, and the rows that match every criterion, oldest first.

    Raises ConfigError if a run or sweep does not exist, or nothing matches.

    Args:
        rows: table of runs, oldest first.
        runs: run ids.
        sweep: id or name of a sweep: the newest `-m sweep=NAME`, else the newest whose runs have that name or whose id
            starts with it.
        where: conditions, as `slipway runs` takes them.
        sort: sort key, as `slipway runs` takes it.
        last: number of runs to keep, as `slipway runs` takes it.
        boards: ids of all runs by sweep, as this machine knows them. The table lists a run under the sweep that made it
            only; a later sweep that contains it does not run it again.
    """
    known = {row["run"]: row for row in rows if ID_PATTERN.fullmatch(row["run"])}
    if not known:
        raise ConfigError("no runs are recorded on this machine; `--refresh cloud=…` reads the bucket's")
    if unknown := [run for run in runs if run not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{unknown[0]}: no such run; {hint}`slipway runs` lists them, --refresh reads the bucket's")
    name = sweep or (runs[0] if len(runs) == 1 else "runs")
    if not (runs or sweep or where or sort or last):
        own = [row for row in known.values() if not row.get("samples_for")]  # not those of its pods of samplers
        newest = (own or list(known.values()))[-1]
        name = sweep = str(newest.get("sweep") or "")
        if not sweep:
            name, runs = newest["run"], [newest["run"]]
    kept = [row for row in known.values() if not runs or row["run"] in runs]
    if sweep:
        name = _resolve_sweep_id(sweep, kept, boards)
        kept = [row for row in kept if row.get("sweep") == name or row["run"] in boards.get(name, ())]
    names = {row["run"] for row in filter_rows(kept, where, sort, last)}
    if not names:
        raise ConfigError("no run matches; `slipway runs` takes the same conditions and shows the table")
    return name if ID_PATTERN.fullmatch(name) else "runs", [row for row in kept if row["run"] in names]


def _resolve_sweep_id(name: str, rows: Sequence[RunRow], boards: Mapping[str, Collection[str]]) -> str:
    of_a_sweep = [row for row in rows if row.get("sweep")]
    if name in boards or any(row["sweep"] == name for row in of_a_sweep):
        return name
    called = [row for row in of_a_sweep if f"sweep={name}" in (str(w).lstrip("+") for w in row.get("overrides") or ())]
    like = [row for row in of_a_sweep if row.get("name") == name or str(row["sweep"]).startswith(name)]
    for row in reversed(called or like):
        return str(row["sweep"])
    there = list(dict.fromkeys(str(row["sweep"]) for row in reversed(of_a_sweep)))[:5]
    raise ConfigError(f"--sweep {name}: no such sweep; the latest: {', '.join(there) or 'none'}")

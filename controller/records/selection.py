"""Select the runs of a command: by id, by sweep, by conditions on the table, or else the last run."""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from controller.core.errors import ConfigError
from controller.records.index import RunRow
from controller.records.table import filter_rows

ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]{0,199}", re.ASCII)
"""Pattern of the id of a run or sweep. Ids become part of paths, and others can write to the bucket of the rows."""


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

    Raises:
        ConfigError: a run or sweep does not exist, or nothing matches.
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

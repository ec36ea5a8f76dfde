"""`status` of a run whose bucket is gone or was emptied, as after `localcloud wipe`: what this machine has recorded."""

import json
import sys
from pathlib import Path
from typing import Any

from controller.core.layout import DEFAULT_WIDTH, width_of, wrap
from controller.core.metric_lines import format_duration, result_lines
from controller.core.text import plural
from controller.records import index
from controller.records.index import RunRow
from controller.records.recorder import run_folder
from controller.run.options import RunOptions


def finished_row(state: Path, run_id: str) -> RunRow | None:
    """Return the row of a run that has finished; None if this machine does not know it as finished."""
    rows = (row for row in index.load_rows(state) if row.get("run") == run_id)
    return next((row for row in rows if row.get("state") == "finished"), None)


def show(options: RunOptions, why: str, *, as_json: bool) -> bool:
    """Print the record of a finished run; return False if there is none.

    Args:
        options: name the run.
        why: what the bucket lacks.
        as_json: print JSON.
    """
    row = finished_row(options.state_dir, options.run_id)
    if row is None:
        return False
    folder = run_folder(options.state_dir, options.run_id)
    if as_json:
        print(json.dumps({"run": _document(row, folder), "missing": why}, indent=1))
    else:
        width = width_of(sys.stdout)
        print("\n".join(wrap(line, width, 5) for line in _lines(row, folder, why, width)))
    return True


def _document(row: RunRow, folder: Path) -> dict[str, Any]:
    facts = {key: row.get(key) for key in ("attempts", "seconds", "pod_hours", "usd")}
    return {"id": row["run"], "state": row["state"], **facts, "summary": row.get("metrics"), "results": str(folder)}


def _lines(row: RunRow, folder: Path, why: str, width: int | None) -> list[str]:
    metrics, attempts, seconds = row.get("metrics"), row.get("attempts"), row.get("seconds")
    tries = f", {plural(attempts, 'attempt')}" if isinstance(attempts, int) else ""
    took = f", {format_duration(seconds)}" if isinstance(seconds, int | float) else ""
    lines = [f"run  {row['run']}: {row['state']}{tries}{took}"]
    lines += [
        f"     {line}"
        for line in result_lines(metrics if isinstance(metrics, dict) else {}, (width or DEFAULT_WIDTH) - 5)
    ]
    lines.append(f"     from the record of this machine: {folder}")
    lines.append(f"     {why.partition(': ')[2] or why}, so the run cannot be repeated; its pod was not looked for")
    return lines

"""`slipway runs`: list runs in a table, or show the differences between two of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from conf.strict_json import dumps
from controller.core.errors import ConfigError
from controller.core.json_documents import append_lines
from controller.core.text import object_url, one_line, width_of
from controller.records import index
from controller.records.table import as_csv, filter_rows, format_table

if TYPE_CHECKING:
    from controller.cli.main import Command
    from controller.records.recorder import RunRecord

MAX_WARNINGS = 5
"""Rows that are named before the rest is counted."""


def run_runs(command: Command) -> int:
    flags = command.flags
    if flags.csv and flags.json:
        raise ConfigError("--csv and --json are two forms: give one of them")
    state = command.options.state_dir
    fetched = fetch_rows(command, state) if flags.refresh else []
    if flags.diff:
        return _print_diff(command, state, fetched)
    left_out: list[index.LeftOut] = []
    rows = filter_rows(index.load_rows(state, left_out, fetched), flags.where, flags.sort, flags.last)
    if left_out:
        for row in left_out[:MAX_WARNINGS]:
            print(f"warning: {index.index_file(state)}: line {row.where} is left out: {row.why}", file=sys.stderr)
        _mend(state, len(left_out) - MAX_WARNINGS)
    if flags.csv:
        print(as_csv(rows), end="")
    else:
        print(dumps(rows, indent=1) if flags.json else "\n".join(format_table(rows, width_of(sys.stdout))))
    return 0


def _mend(state: Path, more: int) -> None:
    """Take what is no row of any Slipway out of the table, so that the next command does not meet it again."""
    also = f"{more} more are left out; " if more > 0 else ""
    try:
        index.mend(state)
    except OSError as error:
        print(f"warning: {also}the table cannot be mended: {error.strerror}", file=sys.stderr)
    else:
        print(f"warning: {also}`slipway runs --refresh` reads the bucket's table", file=sys.stderr)


def _print_diff(command: Command, state: Path, fetched: list[index.RunRow]) -> int:
    from controller.records.table import diff_records, format_diff

    old, new = command.flags.diff
    rows = {row["run"]: row for row in index.load_rows(state, fetched=fetched)}
    found = diff_records(_load_record(command, state, old, rows), _load_record(command, state, new, rows))
    print(dumps(found, indent=1) if command.flags.json else "\n".join(format_diff(old, new, found)))
    return 0


def requested_runs(command: Command) -> tuple[Path, str, list[index.RunRow]]:
    """Return the state folder, a name for the selection, and the runs selected by flags like those of `report`."""
    from controller.records.table import select_runs
    from controller.sweep.board import run_ids_by_sweep

    flags, state = command.flags, command.options.state_dir
    fetched = fetch_rows(command, state) if flags.refresh else []
    criteria = (flags.runs, flags.sweep, flags.where, flags.sort, flags.last)
    return state, *select_runs(index.load_rows(state, fetched=fetched), *criteria, boards=run_ids_by_sweep(state))


def keep_lines(file: Path, text: str) -> None:
    """Append to a file what was read from the bucket; a state folder that does not take it is said."""
    try:
        append_lines(file, text)
    except OSError as error:
        why = "what the bucket has is shown, and not kept on this machine"
        print(f"warning: {file}: {error.strerror or error}: {why}", file=sys.stderr)


def fetch_rows(command: Command, state: Path) -> list[index.RunRow]:
    """Return the runs in the bucket's table, and add them to this machine's if it takes them."""
    from controller.config.run_yaml import bucket_name
    from controller.connect import open_context, project_of

    config, left_out = command.options.cloud_config(), list[index.LeftOut]()
    bucket = bucket_name(config, project_of(config))
    with open_context(config) as (context, _), command.options.showing("reading the table of runs in the bucket"):
        found = index.list_published_rows(context.google, bucket, left_out)
    for row in left_out[:MAX_WARNINGS]:
        where = object_url(bucket, one_line(str(row.where)))
        print(f"warning: {where} is left out: {row.why}", file=sys.stderr)
    if left_out[MAX_WARNINGS:]:
        print(f"warning: {len(left_out) - MAX_WARNINGS} more rows of the bucket are left out", file=sys.stderr)
    known = {row["run"]: row for row in index.load_rows(state)}
    new = [row for row in found if known.get(row["run"], {}) != {**known.get(row["run"], {}), **row}]
    keep_lines(index.index_file(state), index.as_lines(new))
    return found


def _load_record(command: Command, state: Path, run_id: str, rows: Mapping[str, index.RunRow]) -> RunRecord:
    from controller.records import recorder

    document = recorder.load_record(state, run_id)
    if document is None:
        from controller.records.restore import find_record

        document = find_record(command.overrides, run_id, Path.cwd())
    if (row := rows.get(run_id)) is None:
        raise ConfigError(f"{run_id}: not in the table of runs; `slipway runs --refresh` reads the bucket's")
    return document | {"row": row}

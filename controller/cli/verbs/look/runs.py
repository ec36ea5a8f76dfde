"""`slipway runs`: the table of runs, and what differs between two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from controller.core.errors import ConfigError
from controller.records import index
from controller.records.table import as_csv, as_lines, chosen

if TYPE_CHECKING:
    from controller.cli.main import Command
    from controller.records.recorder import Document


def run(command: Command) -> int:
    flags = command.flags
    state = command.options.state_dir
    if flags.refresh:
        refresh(command, state)
    if flags.diff:
        return _diff(command, state)
    rows = chosen(index.rows(state), flags.where, flags.sort, flags.last)
    if flags.csv:
        print(as_csv(rows), end="")
    else:
        print(json.dumps(rows, indent=1) if flags.json else "\n".join(as_lines(rows)))
    return 0


def _diff(command: Command, state: Path) -> int:
    from controller.records.diff import as_lines, difference

    old, new = command.flags.diff
    found = difference(_record(command, state, old), _record(command, state, new))
    print(json.dumps(found, indent=1) if command.flags.json else "\n".join(as_lines(old, new, found)))
    return 0


def asked_for(command: Command) -> tuple[Path, str, list[index.Row]]:
    """The state folder, and the runs that a verb with the flags of `report` means, with a name for them together."""
    from controller.records.selection import selected
    from controller.sweep.board import runs_of_sweeps

    flags, state = command.flags, command.options.state_dir
    if flags.refresh:
        refresh(command, state)
    words = (flags.runs, flags.sweep, flags.where, flags.sort, flags.last)
    return state, *selected(index.rows(state), *words, boards=runs_of_sweeps(state))


def refresh(command: Command, state: Path) -> None:
    """Add what other machines have put into the bucket."""
    from controller.cloud.connect import connected, project_of
    from controller.plan.project import bucket_name

    config = command.options.cloud_config()
    with connected(config) as (world, _):
        found = index.published(world.google, bucket_name(config, project_of(config)))
    known = {row["run"]: row for row in index.rows(state)}
    index.add(state, [row for row in found if known.get(row["run"], {}) != {**known.get(row["run"], {}), **row}])


def _record(command: Command, state: Path, run_id: str) -> Document:
    from controller.records import recorder

    document = recorder.read(state, run_id)
    if document is None:
        from controller.records.restore import found

        document = found(command.overrides, run_id, Path.cwd())
    row = next((row for row in index.rows(state) if row["run"] == run_id), None)
    if row is None:
        raise ConfigError(f"{run_id}: is not in the table of runs; `slipway runs --refresh` reads that of the bucket")
    return document | {"row": row}

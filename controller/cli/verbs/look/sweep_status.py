"""`status --sweep NAME`: show the board of a sweep as its controller on this machine writes it, once or until its end.

It reads neither config nor cloud; with the sweep's overrides (`status -m …`), the bucket is read too.
"""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from controller.cli.main import Command
from controller.core.clock import Clock
from controller.core.errors import ConfigError
from controller.core.layout import print_wrapped, width_of
from controller.records import index
from controller.run.text_screen import PLAIN_LINE_SECONDS
from controller.sweep.board import BoardRow, SavedBoard, format_counts, format_table, load_board
from controller.sweep.live import redrawing, render_board

POLL_SECONDS = 1.0
ABANDONED = (
    "nobody has driven this sweep since {}, when its controller ended; the board is of that time. Programs on its pods "
    "go on; the same `slipway -m …` continues the sweep, `slipway down -m …` ends it"
)


def run(command: Command, clock: Clock | None = None) -> int:
    state = command.options.state_dir
    show_status(state, resolve_sweep_id(state, command.flags.sweep), clock or Clock(), command.flags)
    return 0


def show_status(state: Path, name: str, clock: Clock, flags: Namespace) -> None:
    """Show the status once, or with `flags.follow` until the sweep's end; `flags.json` prints JSON."""
    if flags.follow and sys.stdout.isatty() and not flags.json:

        def draw(height: int, width: int) -> Any:
            return render_board(list(read_board(state, name).rows.values()), clock.now(), height, width)

        with redrawing(draw):
            while not ((found := read_board(state, name)).is_finished or found.is_abandoned):
                clock.sleep(POLL_SECONDS)
    elif flags.follow:
        for line in watch_changes(state, name, clock):
            print(json.dumps(line.to_json()) if flags.json else _format_change(line, clock), flush=True)
    found = read_board(state, name)
    lines = list(found.rows.values())
    width = width_of(sys.stdout)
    if flags.json and not flags.follow:
        document = {
            "sweep": name,
            "time": found.time,
            "over": found.is_finished,
            "driven": not (found.is_finished or found.is_abandoned),
            "runs": [line.to_json() for line in lines],
        }
        print(json.dumps(document, indent=1))
    elif not flags.json:
        now = found.time if found.is_abandoned else clock.now()
        print("\n".join([f"sweep {name}: {format_counts(lines)}", *format_table(lines, now, width)]))
    if found.is_abandoned and not flags.json:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.time))
        print_wrapped([ABANDONED.format(since)])


def _format_change(line: BoardRow, clock: Clock) -> str:
    return "\n".join(format_table([line], clock.now(), width_of(sys.stdout))[1:])


def resolve_sweep_id(state: Path, name: str) -> str:
    """Return the sweep with this id, the newest whose runs have this name, or the only one whose id starts with it.

    Raises:
        ConfigError: there is no such sweep, or several.
    """
    ended = {row["sweep"]: None for row in index.load_rows(state) if row.get("sweep")}
    known = list(dict.fromkeys([*ended, *(file.stem for file in sorted(state.glob("sweeps/*.json")))]))
    found = [name] if name in known else [each for each in known if each.startswith(name)]
    if called := [each for each in found if each.rpartition("-")[0] == name]:
        boards = {each: state / "sweeps" / f"{each}.json" for each in called}
        found = [max(called, key=lambda each: boards[each].stat().st_mtime if boards[each].is_file() else 0.0)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"--sweep {name}: ambiguous, matches {', '.join(found)}")
    listed = f"the latest: {', '.join(known[-10:])}" if known else "this machine has no record of any"
    raise ConfigError(f"--sweep {name}: no such sweep; {listed}. `slipway runs --refresh` reads the bucket's runs")


def read_board(state: Path, name: str) -> SavedBoard:
    """Return the saved board; without a controller on this machine, build it from the table of runs."""
    file = state / "sweeps" / f"{name}.json"
    if file.is_file():
        return load_board(file)
    rows = [row for row in index.load_rows(state) if row.get("sweep") == name]
    shared = set.intersection(*(set(row.get("overrides") or ()) for row in rows)) if rows else set()
    return SavedBoard(is_finished=True, rows={row["run"]: _row_from_record(row, shared) for row in rows})


def watch_changes(state: Path, name: str, clock: Clock) -> Iterator[BoardRow]:
    """Yield each run when its state changes, and from time to time when its step does, until the sweep's end."""
    told: dict[str, tuple[BoardRow, float]] = {}
    while True:
        found = read_board(state, name)
        for line in _changed_rows(found.rows.values(), told, clock.now()):
            told[line.run] = replace(line), clock.now()
            yield line
        if found.is_finished or found.is_abandoned:
            return
        clock.sleep(POLL_SECONDS)


def _changed_rows(lines: Iterable[BoardRow], told: dict[str, tuple[BoardRow, float]], now: float) -> Iterator[BoardRow]:
    for line in lines:
        before, when = told.get(line.run, (None, 0.0))
        if before is None:
            yield line
            continue
        stepped = before.step != line.step and now - when >= PLAIN_LINE_SECONDS
        if stepped or (before.state, before.pod) != (line.state, line.pod):
            yield line


def _row_from_record(row: dict[str, Any], shared: set[str]) -> BoardRow:
    numbers = {key: value for key, value in (row.get("metrics") or {}).items() if isinstance(value, int | float)}
    metric, value = next(iter(numbers.items()), ("", None))
    return BoardRow(
        row["run"],
        " ".join(word for word in row.get("overrides") or () if word not in shared),
        row.get("state", ""),
        seconds=row.get("seconds"),
        metric=metric,
        values=[] if value is None else [float(value)],
        cost="" if row.get("usd") is None else f"about ${row['usd']:.2f}",
    )

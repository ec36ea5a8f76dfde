"""The verbs with `-m`: `up`, `plan`, `status` and `down` for all runs of a sweep; and `status --sweep NAME`."""

import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from conf.strict_json import dumps
from controller.checks.preflight import preflight, probe_cloud
from controller.checks.project import all_code_is_shipped, missed_code
from controller.cli.main import Command
from controller.core.errors import ConfigError
from controller.core.finding import Finding
from controller.core.text import print_wrapped, width_of, wrap
from controller.core.this_process import Clock
from controller.gcp.credentials import missing_project
from controller.inputs.code import take_snapshot
from controller.records import index
from controller.records.index import LastCommand, save_last_command
from controller.run.text_screen import PLAIN_LINE_SECONDS
from controller.sweep.board import (
    BoardRow,
    SavedBoard,
    format_counts,
    format_table,
    load_board,
    redrawing,
    render_board,
)
from controller.sweep.definition import SweepDefinition, SweepJob, override_key
from controller.sweep.grid import sweep_notes
from controller.sweep.pod_pool import delete_pods, drive_sweep
from controller.sweep.sweep_session import SweepSession, open_sweep

POLL_SECONDS = 1.0
ABANDONED = (
    "nobody drives this sweep: its controller has ended, and was last heard of at {}; the board is of that time. "
    "Programs on its pods go on; the same `slipway -m …` continues the sweep, `slipway down -m …` ends it"
)


def run_up(command: Command) -> int:
    drive_sweep(command.options, partial(_remember, command.overrides))
    return 0


def _remember(overrides: Sequence[str], definition: SweepDefinition) -> None:
    """Let `slipway status` in this folder mean this sweep."""
    shared = tuple(word for word in overrides if override_key(word) not in definition.swept_keys)
    save_last_command(LastCommand(shared, sweep=definition.id, sweep_words=tuple(overrides)), Path.cwd())


def run_plan(command: Command) -> int:
    for name in ("config", "permissions", "save"):
        if getattr(command.flags, name):
            raise ConfigError(f"--{name}: is of one run; leave out -m, and give one value of each key")
    with open_sweep(command.options) as session:
        definition, rows = session.definition, session.board_rows()
        config = definition.jobs[0].config if definition.jobs else definition.base_config
        code = take_snapshot(config, definition.folder)
        notes = [*sweep_notes(command.overrides, definition.sweep), *definition.repeats]
        if command.flags.json:
            states = {row.run: row.state for row in rows}
            runs = [_job_json(session, job, states[job.run_id]) for job in definition.jobs]
            said = definition.sweep.hypothesis
            document = {
                "sweep": definition.id,
                "runs": runs,
                "pods": session.pods,
                "left_out": dict(code.left_out),
                "notes": notes,
            }
            document["hypothesis"] = said and {**said.model_dump(), "misfit": definition.misfit}
            print(dumps(document | {"estimate": asdict(session.estimate())}, indent=1))
            return 0
        guesses = {job.run_id: guess for job in definition.jobs if (guess := session.estimate_of(job))}
        lines = [
            f"  {'=' if row.state == 'finished' else '+'} {row.run}  {row.title}"
            + (f"  {guesses[row.run].summary}" if row.run in guesses and row.state != "finished" else "")
            for row in rows
        ]
        width = width_of(sys.stdout)
        head = [wrap(line, width, 9) for line in session.summary_lines()]
        said = [wrap(f"note: {note}", width, 2) for note in notes]
        print("\n".join([*head, "", *(wrap(line, width, 6) for line in lines), *said]))
        if no_project := missing_project(session.context.project):
            findings = [
                Finding(
                    "project", "warning", "cloud.project", f"{no_project}; `plan` goes on without it, `up` does not"
                )
            ]
        else:
            with command.options.showing("checking the project"):
                findings = probe_cloud(definition.base_config, session.context)
        missed = [all_code_is_shipped.rule.finding(*issue) for issue in missed_code(config, code)]
        findings = [*findings, *missed, *_offline_findings(definition)]
        findings = [finding for finding in findings if finding.severity != "note"]
        print("\n".join(wrap(f"{finding.severity}: {finding}", width, 2) for finding in findings))
        return 2 if any(finding.severity == "error" for finding in findings) else 0


def _job_json(session: SweepSession, job: SweepJob, state: str) -> dict[str, Any]:
    guess = session.estimate_of(job)
    estimate = {"hours": guess and guess.hours, "usd": guess and guess.usd, "spread": guess and guess.spread}
    words = job.variant.own_overrides
    return {"run": job.run_id, "case": job.variant.case, "words": words, "state": state, **estimate}


def _offline_findings(definition: SweepDefinition) -> list[Finding]:
    """Return each finding about the runs once, with the number of runs unless it is about all."""
    jobs = definition.jobs
    if not jobs:
        return [finding for finding in preflight(definition.base_config) if finding.check != "sweep_unused"]
    counts = Counter(finding for job in jobs for finding in job.findings)
    return [
        finding if count == len(jobs) else replace(finding, message=f"{finding.message} ({count} of {len(jobs)} runs)")
        for finding, count in counts.items()
    ]


def run_status(command: Command) -> int:
    with open_sweep(command.options) as session:
        sweep_id, clock, rows = session.definition.id, session.context.clock, session.board_rows()
        holder = session.lease().current_other()
        driver = None if holder is None else str(holder.record)
        if command.flags.follow:
            show_status(session.context.state_dir, sweep_id, clock, command.flags)
            return 0
    if command.flags.json:
        document = {"sweep": sweep_id, "driver": driver, "runs": [row.to_json() for row in rows]}
        print(dumps(document, indent=1))
    else:
        driven = [] if driver is None else [f"controlled by {driver}"]
        table = format_table(rows, clock.now(), width_of(sys.stdout))
        print("\n".join([f"sweep {sweep_id}: {format_counts(rows)}", *driven, *table]))
    return 0


def run_down(command: Command) -> int:
    if command.flags.all:
        raise ConfigError("--all: not possible with -m; `down -m` deletes the sweep's pods, `down --all` the rest")
    names = delete_pods(command.options)
    print(dumps({"deleted": names}) if command.flags.json else f"deleted: {', '.join(names) or 'nothing'}")
    return 0


def show_sweep(command: Command, clock: Clock | None = None) -> int:
    """`status --sweep NAME`: show a sweep's board as its controller on this machine writes it, once or until its end.

    It reads neither config nor cloud; with the sweep's overrides (`status -m …`), the bucket is read too.
    """
    state = command.options.state_dir
    show_status(state, resolve_sweep_id(state, command.flags.sweep), clock or Clock(), command.flags)
    return 0


def show_status(state: Path, name: str, clock: Clock, flags: Namespace) -> None:
    """Show the status once, or with `flags.follow` until the sweep's end; `flags.json` prints JSON."""

    def board_row(line: BoardRow) -> str:
        return "\n".join(format_table([line], clock.now(), width_of(sys.stdout))[1:])

    if flags.follow and sys.stdout.isatty() and not flags.json:

        def draw(height: int, width: int) -> Any:
            return render_board(list(read_board(state, name).rows.values()), clock.now(), height, width)

        with redrawing(draw):
            while not ((found := read_board(state, name)).is_finished or found.is_abandoned):
                clock.sleep(POLL_SECONDS)
    elif flags.follow:
        for line in watch_changes(state, name, clock):
            print(dumps(line.to_json()) if flags.json else board_row(line), flush=True)
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
        print(dumps(document, indent=1))
    elif not flags.json:
        now = found.time if found.is_abandoned else clock.now()
        print("\n".join([f"sweep {name}: {format_counts(lines)}", *format_table(lines, now, width)]))
    if found.is_abandoned and not flags.json:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.time))
        print_wrapped([ABANDONED.format(since)])


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
    """Return the saved board; if this machine has none that can be read, build it from the table of runs."""
    if (found := load_board(state / "sweeps" / f"{name}.json")) != SavedBoard():
        return found
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
    line = BoardRow(
        row["run"],
        " ".join(word for word in row.get("overrides") or () if word not in shared),
        row.get("state", ""),
        seconds=row.get("seconds"),
        cost="" if row.get("usd") is None else f"about ${row['usd']:.2f}",
    )
    line.show_result(row.get("metrics") or {})
    return line

"""The verbs with `-m`: `up`, `plan`, `status` and `down` for all runs of a sweep."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from controller.checks.preflight import preflight, probe_cloud
from controller.cli.main import Command
from controller.cli.verbs.look.sweep_status import show_status
from controller.cloud.connect import missing_project
from controller.core.errors import ConfigError
from controller.core.finding import Finding
from controller.core.layout import width_of, wrap
from controller.records.last_command import LastCommand, save
from controller.sweep.board import format_counts, format_table
from controller.sweep.definition import SweepDefinition, SweepJob, override_key
from controller.sweep.drive import delete_pods, drive_sweep
from controller.sweep.session import SweepSession, open_sweep


def up(command: Command) -> int:
    drive_sweep(command.options, partial(_remember, command.overrides))
    return 0


def _remember(overrides: Sequence[str], definition: SweepDefinition) -> None:
    """Let `slipway status` in this folder mean this sweep."""
    shared = tuple(word for word in overrides if override_key(word) not in definition.swept_keys)
    save(LastCommand(shared, sweep=definition.id, sweep_words=tuple(overrides)), Path.cwd())


def plan(command: Command) -> int:
    with open_sweep(command.options) as session:
        definition, rows = session.definition, session.board_rows()
        if command.flags.json:
            states = {row.run: row.state for row in rows}
            runs = [_job_json(session, job, states[job.run_id]) for job in definition.jobs]
            said = definition.sweep.hypothesis
            document = {"sweep": definition.id, "runs": runs, "pods": definition.sweep.pods}
            document["hypothesis"] = said and {**said.model_dump(), "misfit": definition.misfit}
            print(json.dumps(document | {"estimate": asdict(session.estimate())}, indent=1))
            return 0
        guesses = {job.run_id: guess for job in definition.jobs if (guess := session.estimate_of(job))}
        lines = [
            f"  {'=' if row.state == 'finished' else '+'} {row.run}  {row.title}"
            + (f"  {guesses[row.run].summary}" if row.run in guesses and row.state != "finished" else "")
            for row in rows
        ]
        width = width_of(sys.stdout)
        head = [wrap(line, width, 9) for line in session.summary_lines()]
        print("\n".join([*head, "", *(wrap(line, width, 6) for line in lines)]))
        if no_project := missing_project(session.context.project):
            findings = [
                Finding(
                    "project", "warning", "cloud.project", f"{no_project}; `plan` goes on without it, `up` does not"
                )
            ]
        else:
            with command.options.showing("checking the project"):
                findings = probe_cloud(definition.base_config, session.context)
        findings = [*findings, *_offline_findings(definition)]
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
        return preflight(definition.base_config)
    counts = Counter(finding for job in jobs for finding in job.findings)
    return [
        finding if count == len(jobs) else replace(finding, message=f"{finding.message} ({count} of {len(jobs)} runs)")
        for finding, count in counts.items()
    ]


def status(command: Command) -> int:
    with open_sweep(command.options) as session:
        sweep_id, clock, rows = session.definition.id, session.context.clock, session.board_rows()
        holder = session.lease().current_other()
        driver = None if holder is None else str(holder.record)
        if command.flags.follow:
            show_status(session.context.state_dir, sweep_id, clock, command.flags)
            return 0
    if command.flags.json:
        document = {"sweep": sweep_id, "driver": driver, "runs": [row.to_json() for row in rows]}
        print(json.dumps(document, indent=1))
    else:
        driven = [] if driver is None else [f"controlled by {driver}"]
        table = format_table(rows, clock.now(), width_of(sys.stdout))
        print("\n".join([f"sweep {sweep_id}: {format_counts(rows)}", *driven, *table]))
    return 0


def down(command: Command) -> int:
    if command.flags.all:
        raise ConfigError("--all: not possible with -m; `down -m` deletes the sweep's pods, `down --all` the rest")
    names = delete_pods(command.options)
    print(json.dumps({"deleted": names}) if command.flags.json else f"deleted: {', '.join(names) or 'nothing'}")
    return 0


VERBS = {"up": up, "plan": plan, "status": status, "down": down}

"""For notebooks and scripts: `from controller import api`. What the command line does, as plain Python values.

Words are those of the command line: `api.up("+experiment=quickstart", "run.seed=1")`. Errors are those of
`controller.core.errors`, in words. docs/api.md
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.schema.config import Config
from controller.cli.main import Command, parse
from controller.core.errors import ConfigError, SlipwayError
from controller.records import index
from controller.records.recorder import folder_of
from controller.records.table import chosen

__all__ = ["Config", "ConfigError", "SlipwayError", "compose", "metrics", "plan", "record", "runs", "sweep", "up"]

Row = dict[str, Any]


def compose(*words: str) -> Config:
    """The config that the words mean.

    Raises:
        ConfigError: every mistake in it.
    """
    return _command("plan", words).config()[0]


def plan(*words: str) -> dict[str, Any]:
    """What `up` would do: {run, pod, bucket, usd_per_hour, resources: [{id, title, action, …}], findings, …}.

    Raises:
        ConfigError: the config is unusable.
    """
    from controller.cli.verbs.run.plan import as_document, gather

    return as_document(*gather(_command("plan", words)))


def up(*words: str, yes: bool = False, queue: bool = False, run: str | None = None) -> Row:
    """Bring a run to its end, and return its row (see `runs`). One that has finished already is not made again.

    Args:
        yes: create what is billed without being asked.
        queue: wait while another run has the pod.
        run: the id of a run to repeat, or to go on with, from its record; the words are those beside `--run`.

    Raises:
        SlipwayError: it failed; its class says how, as the exit code does.
    """
    from controller.cli.verbs.run.up import bring_about

    flags = Namespace(json=False, yes=yes, detach=False, queue=queue, take_over=False, run=run, plan=None)
    return _row(_state(words), bring_about(Command("up", flags, words)))


def sweep(*words: str, yes: bool = False) -> list[Row]:
    """Bring all runs of a sweep to their end; their rows, in the order of the grid; of a search as they began.

    Raises:
        ProgramFailed: some runs were given up; the others have finished.
    """
    from controller.cli.verbs.run.sweep import up as carry_through
    from controller.sweep.definition import base_of, study

    carry_through(Command("up", Namespace(json=False, yes=yes, take_over=False), words))
    state = Path(base_of(words, Path.cwd()).run.state_dir).expanduser()
    found = study(words, Path.cwd())
    if found.space is not None:
        return chosen(index.rows(state), [f"sweep={found.id}"], None, None)
    return [_row(state, job.run_id) for job in found.jobs]


def runs(*conditions: str, sort: str | None = None, last: int | None = None, state: Path | None = None) -> list[Row]:
    """The table of runs, one flat dict each: `pandas.DataFrame(api.runs("state=finished"))`.

    Args:
        conditions: `state=finished`, `metrics.accuracy_after>=0.8`, `overrides~seed`.
        sort: a key; the largest comes last.
        last: only so many, from the end.
        state: the state folder, by default `$SLIPWAY_HOME` or `~/.slipway`.
    """
    return chosen(index.rows(state or _state(())), conditions, sort, last)


def metrics(run: str, *, phase: str | None = None, state: Path | None = None) -> list[Row]:
    """The lines of a finished run's metrics.jsonl: `pandas.DataFrame(api.metrics(ID, phase="eval"))`.

    Args:
        run: its id.
        phase: only lines of that phase: train, eval, …

    Raises:
        ConfigError: this machine has no metrics of such a run.
    """
    file = folder_of(state or _state(()), run) / "metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"{run}: this machine has no metrics of it; `slipway status --run {run}` says where they are")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if phase is None or line.get("phase") == phase]


def record(run: str, *, state: Path | None = None) -> dict[str, Any]:
    """What made a run: config, words, code, packages, devices, data, prices. docs/runs.md

    Raises:
        ConfigError: this machine has no record of it.
    """
    from controller.records.recorder import read

    found = read(state or _state(()), run)
    if found is None:
        raise ConfigError(f"{run}: this machine has no record of it; `slipway runs --refresh` reads the bucket's table")
    return found


def _command(verb: str, words: Sequence[str]) -> Command:
    return parse([verb, *words])


def _state(words: Sequence[str]) -> Path:
    from controller.cli.verbs.look.runs import state_of

    return state_of(_command("runs", words))


def _row(state: Path, run: str) -> Row:
    [row] = chosen(index.rows(state), [f"run={run}"], None, None)
    return row

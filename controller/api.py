"""Python API for notebooks and scripts: `from slipway import api`. It returns plain Python values.

Overrides are those of the command line: `api.up("+experiment=quickstart", "run.seed=1")`. Errors are those of
`controller.core.errors`. See docs/api.md.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from conf.schema.config import Config
from conf.strict_json import restored
from controller.core.errors import CloudError, ConfigError, SlipwayError
from controller.records import index
from controller.records.recorder import run_folder
from controller.records.table import ROW_KEYS, filter_rows
from controller.run.options import RunOptions
from controller.ssh.fleet import Fleet

if TYPE_CHECKING:
    from controller.run.session import Session
    from controller.ssh.worker_connection import WorkerConnection

__all__ = [
    "Config", "ConfigError", "Pod", "SlipwayError", "Status",
    "cancel", "compose", "logs", "metrics", "plan", "pod", "record", "runs", "start", "status", "sweep", "up",
]  # fmt: skip

Row = dict[str, Any]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Status:
    """State of a run: absent (never launched), running, stopped (failed, cancelled or interrupted) or finished.

    `attempt` is the number of the latest attempt, from 1; `summary` is what the program left in summary.json.
    """

    run: str
    state: Literal["absent", "running", "stopped", "finished"]
    attempt: int = 0
    summary: dict[str, Any] = field(default_factory=dict)


def compose(*overrides: str) -> Config:
    """Return the config that the overrides compose.

    Raises:
        ConfigError: the config is invalid; lists every mistake.
    """
    return RunOptions(overrides).config()[0]


def plan(*overrides: str) -> dict[str, Any]:
    """Return what `up` would do: {run, pod, bucket, usd_per_hour, resources: [{id, title, action, …}], findings, …}.

    Raises:
        ConfigError: the config is invalid.
    """
    from controller.run.preview import preview_run

    return preview_run(RunOptions(overrides)).as_document()


def up(*overrides: str, yes: bool = False, queue: bool = False, run: str | None = None, trust: bool = False) -> Row:
    """Drive a run to its end and return its row (see `runs`). A finished run is not repeated.

    Args:
        yes: create billed resources without asking.
        queue: wait while another run uses the pod.
        run: id of a run to repeat or continue from its record, as `--run` does; overrides are added to it.
        trust: execute a record that this machine did not make without asking.

    Raises:
        SlipwayError: the run failed; each exit code has its own class.
    """
    from controller.run.drive import open_run
    from controller.run.text_screen import TextScreen
    from controller.sampler_crew import drive

    options = RunOptions(overrides, run_id=run or "", yes=yes, queue=queue, trust=trust)
    with open_run(options) as (opened, context, emulator), TextScreen(opened) as screen:
        drive(options, opened, context, emulator, screen)
    return _row(context.state_dir, opened.run_id)


def start(*overrides: str, yes: bool = False, run: str | None = None, trust: bool = False) -> Row:
    """Start a run and return its row as soon as its program runs; `up` with the same overrides follows it.

    Nobody recovers the run until then. Arguments are those of `up`.

    Raises:
        SlipwayError: the program could not be started.
    """
    from controller.run.drive import open_run
    from controller.run.text_screen import TextScreen
    from controller.sampler_crew import drive

    options = RunOptions(overrides, run_id=run or "", yes=yes, detach=True, trust=trust)
    with open_run(options) as (opened, context, emulator), TextScreen(opened) as screen:
        drive(options, opened, context, emulator, screen)
    return _row(context.state_dir, opened.run_id)


def status(*overrides: str, run: str | None = None) -> Status:
    """Return the state of a run; without arguments, of the last one that was started from this folder.

    Raises:
        ConfigError: no run is meant, or the config is invalid.
    """
    from controller.run.launch import running_runs

    with _session(overrides, run) as session:
        result, launches = session.ledger.result(), session.ledger.launches()
        attempt = launches[-1].attempt if launches else 0
        if result is not None:
            return Status(session.plan.run_id, "finished", attempt, result.summary)
        fleet = session.fleet()
        if fleet is not None and session.plan.run_id in running_runs(fleet):
            return Status(session.plan.run_id, "running", attempt)
        return Status(session.plan.run_id, "stopped" if attempt else "absent", attempt)


def logs(*overrides: str, run: str | None = None, worker: int = 0) -> str:
    """Return what the latest attempt of a run has printed on a worker so far; "" before its launch.

    Raises:
        ConfigError: the pod has no such worker, or no run is meant.
    """
    from controller.agent.protocol import WATCH, WatchRequest
    from controller.gcp.google_errors import NotFoundError
    from controller.ssh.agent_link import WorkerError

    with _session(overrides, run) as session:
        session.parse_worker(worker)
        launches = session.ledger.launches()
        if not launches:
            return ""
        attempt, fleet = launches[-1].attempt, session.fleet()
        if fleet is not None:
            try:
                payload: WatchRequest = {"run_id": session.plan.run_id, "attempt": attempt, "follow": False}
                lines = fleet.stream(worker, WATCH, payload)
                return "".join(line["log"] for line in lines if "log" in line)
            except WorkerError as error:
                if error.kind != "agent":  # the pod may be another one by now
                    raise
        try:
            content = session.context.google.download(session.plan.bucket, session.ledger.log_object(worker, attempt))
        except NotFoundError:
            return ""
        return content.decode(errors="replace")


def cancel(*overrides: str, run: str | None = None) -> bool:
    """End a run's program on every worker; return whether it was running. `up` resumes it from its checkpoint.

    Raises:
        ConfigError: no run is meant, or the config is invalid.
        CloudError: a controller goes on with the run, for it could not be told.
    """
    from controller.run.cancel import cancel_run

    with _session(overrides, run) as session:
        ended = cancel_run(session, lambda message: None)
    if ended.problem:
        raise CloudError(ended.problem)
    return ended.cancelled


def sweep(*overrides: str, yes: bool = False) -> list[Row]:
    """Drive all runs of a sweep to their end and return their rows, in grid order; for a search, in order of start.

    Raises:
        ProgramFailedError: some runs failed for good; the others have finished.
    """
    from controller.sweep.definition import compose_base, define_sweep
    from controller.sweep.pod_pool import drive_sweep

    drive_sweep(RunOptions(overrides, yes=yes))
    state = Path(compose_base(overrides, Path.cwd()).run.state_dir).expanduser()
    definition = define_sweep(overrides, Path.cwd())
    if definition.space is not None:
        found = filter_rows(index.load_rows(state), [f"sweep={definition.id}"], None, None)
        return [_whole(row) for row in found]
    return [_row(state, job.run_id) for job in definition.jobs]


def runs(*conditions: str, sort: str | None = None, last: int | None = None, state: Path | None = None) -> list[Row]:
    """Return the table of runs, one flat dict each with the same keys: `pandas.DataFrame(api.runs("state=finished"))`.

    Args:
        conditions: `state=finished`, `metrics.accuracy_after>=0.8`, `overrides~seed`.
        sort: key to sort by, in ascending order.
        last: return only the last N rows.
        state: state folder, by default `$SLIPWAY_HOME` or `~/.slipway`.
    """
    found = filter_rows(index.load_rows(state or RunOptions().state_dir), conditions, sort, last)
    return [_whole(row) for row in found]


def metrics(run: str, *, phase: str | None = None, state: Path | None = None) -> list[Row]:
    """Return the lines of a finished run's metrics.jsonl: `pandas.DataFrame(api.metrics(ID, phase="eval"))`.

    A line that is no JSON object is left out.

    Args:
        run: id of the run.
        phase: only lines of that phase: train, eval, …
        state: state folder, as in `runs`.

    Raises:
        ConfigError: this machine has no metrics of the run.
    """
    file = run_folder(state or RunOptions().state_dir, run) / "metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"{run}: this machine has no metrics of it; `slipway status --run {run}` shows where")
    from controller.report.gather import parse_lines  # most calls need nothing of reports

    with file.open("rb") as opened:
        lines = map(restored, parse_lines([opened]))
        return [line for line in lines if phase is None or line.get("phase") == phase]


def record(run: str, *, state: Path | None = None) -> dict[str, Any]:
    """Return the record of a run: config, overrides, code, packages, devices, data, prices. See docs/runs.md.

    Raises:
        ConfigError: this machine has no record of the run.
    """
    from controller.records.recorder import load_record

    found = load_record(state or RunOptions().state_dir, run)
    if found is None:
        raise ConfigError(f"{run}: this machine has no record of it; `slipway runs --refresh` reads the bucket's table")
    return found


class Pod:
    """Workers of a pod, each a `fabric.Connection`. Close it, or use it in a `with` statement."""

    def __init__(self, fleet: Fleet, opened: ExitStack) -> None:
        self._fleet, self._opened = fleet, opened

    def __len__(self) -> int:
        return len(self._fleet)

    def connection(self, worker: int = 0) -> WorkerConnection:
        """Return the connection to a worker, which opens on first use: `.run("ls")`.

        Raises:
            ConfigError: the pod has no such worker.
        """
        if worker not in range(len(self)):
            raise ConfigError(f"worker={worker}: the pod has workers 0 to {len(self) - 1}")
        return self._fleet.ssh_connection(worker).connection()

    def connections(self) -> list[WorkerConnection]:
        """Return the connections to all workers, for `fabric.ThreadingGroup.from_connections`."""
        return [self.connection(worker) for worker in range(len(self))]

    def close(self) -> None:
        """Close the connections to the workers and the cloud."""
        self._opened.close()

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pod(*overrides: str, run: str | None = None) -> Pod:
    """Connect to the workers of a running pod: `api.pod().connection(worker=2).run("ls")`.

    Args:
        overrides: config of the pod; by default that of the last `up` in this folder.
        run: id of a run on the pod.

    Raises:
        ConfigError: the pod does not exist or is not ready.
    """
    with ExitStack() as stack:
        fleet = stack.enter_context(_session(overrides, run)).authorized_fleet()
        return Pod(fleet, stack.pop_all())


def _session(overrides: tuple[str, ...], run: str | None) -> AbstractContextManager[Session]:
    """Open a session for a run; without overrides and id, for the last one that was started from this folder."""
    from controller.run.session import open_session

    meant = ""
    if not overrides and not run:
        last = index.load_last_command(Path.cwd())
        overrides, run, meant = last.overrides, last.run, last.meant
        if last.sweep:
            raise ConfigError(f"the last command of this folder was the sweep {last.sweep}; set run=ID")
        if not overrides and not run:
            raise ConfigError("no run was started from this folder; name the pod's experiment, or set run=ID")
    return open_session(RunOptions(overrides, run_id=run or "", meant=meant))


def _row(state: Path, run: str) -> Row:
    [row] = filter_rows(index.load_rows(state), [f"run={run}"], None, None)
    return _whole(row)


def _whole(row: Row) -> Row:
    """Return a row with every key that rows have, besides metrics; None where it lacks one, as until a run's end."""
    return dict.fromkeys(sorted(ROW_KEYS)) | row

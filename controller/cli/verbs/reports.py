"""The curves of runs or of a sweep: `slipway report` writes a page, `tensorboard` shows them (docs/report.md)."""

from __future__ import annotations

import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema.config import Config
from conf.strict_json import dumps
from controller.cli.main import Command
from controller.cli.verbs.runs import requested_runs
from controller.config.compose import compose, quote_text, sound
from controller.connect import open_context
from controller.core.errors import ConfigError
from controller.core.text import plural, print_wrapped
from controller.core.this_process import Clock
from controller.records.index import RunRow
from controller.report.comparison import group_settings
from controller.report.gather import (
    FileReader,
    TensorBoardMirror,
    bucket_reader,
    folder_name,
    gather_runs,
    local_reader,
)

if TYPE_CHECKING:
    from controller.report.contents import ReportModel
    from controller.report.scaling import Scaling

REFRESH_SECONDS = 15.0


def run_report(command: Command) -> int:
    """`slipway report`: write one HTML page about runs, a sweep or a single run."""
    from controller.report.contents import build_report
    from controller.report.page import hypothesis_rows, render
    from controller.report.scaling import scaling_lines

    flags = command.flags
    state, name, rows = requested_runs(command)
    with _file_reader(command, state) as read, command.options.showing("reading metrics and transcripts"):
        found = build_report(name, gather_runs(rows, read), flags.baseline, flags.metric, flags.smooth)
    scaling = _scaling(found, flags)
    # not in the folder of the user's code by default: the page would be shipped, and make every run a new one
    file = Path(flags.output or state / "reports" / f"{name}.html")
    try:
        if not flags.output:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(render(found, Clock().now(), scaling), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}; choose another file with -o FILE") from None
    if flags.json:
        more = {"scaling": scaling.to_json()} if scaling else {}
        print(dumps({"file": str(file), **found.to_json(), **more}, indent=1))
    else:
        what = f"{plural(len(found.settings), 'setting')}, {plural(len(found.runs), 'run')}"
        print_wrapped([f"{file}: {what}, {file.stat().st_size / 1e6:.1f} MB; open it in a browser"])
        print_wrapped((f"{name:<10}{text}" for name, text in hypothesis_rows(found)), indent=10)
        for line in scaling_lines(scaling) if scaling else ():
            print(line)
    return 0


def _scaling(report: ReportModel, flags: Namespace) -> Scaling | None:
    """Measure what --x asks for. Raises ConfigError."""
    from controller.report.scaling import measure_scaling

    if not flags.x:
        if given := [f"--{name}" for name in ("y", "fit", "level") if getattr(flags, name) not in ("", None)]:
            raise ConfigError(f"{given[0]}: needs --x, e.g. --x params")
        return None
    return measure_scaling(report, flags.x, flags.y, flags.fit, flags.level)


@contextmanager
def _file_reader(command: Command, state: Path) -> Iterator[FileReader]:
    """Yield a reader of this machine's files, or with --refresh of the bucket, for runs active or made elsewhere."""
    if not command.flags.refresh:
        yield local_reader(state)
        return
    from controller.config.run_yaml import bucket_name
    from controller.connect import open_context, project_of

    config = command.options.cloud_config()
    with open_context(config) as (context, _):
        yield bucket_reader(context.google, bucket_name(config, project_of(config)), local_reader(state))


def run_tensorboard(command: Command) -> int:
    """`slipway tensorboard`: run TensorBoard with the curves of some runs, or of all runs of a sweep."""
    flags = command.flags
    state, name, rows = requested_runs(command)
    folder = state / "tensorboard" / name
    folders = {run: folder / called for run, called in display_names(rows, state).items()}
    live = {row["run"] for row in rows if row.get("state") != "finished"}
    with open_context(compose_config(rows, command)) as (context, _):
        mirror = TensorBoardMirror(context.google, rows[0]["bucket"], folders)
        with command.options.showing("copying TensorBoard files from the bucket"):
            copied = mirror.update(set(folders))
        if not any(path.is_dir() for path in folders.values()):
            raise ConfigError(f"none of {plural(len(rows), 'run')} has written TensorBoard files to the bucket")
        said = {"folder": str(folder), "runs": len(folders), "files": copied, "url": f"http://localhost:{flags.port}/"}
        print(dumps(said) if flags.json else f"{plural(len(folders), 'run')} in {folder}; press Ctrl-C to stop")
        argv = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(flags.port)]
        board = subprocess.Popen([*argv, "--host", "localhost", "--reload_interval", "10"])
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stop the child too
        try:
            while board.poll() is None:
                if live:
                    context.clock.sleep(REFRESH_SECONDS)
                    mirror.update(live)
                else:
                    board.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            board.terminate()
            board.wait()
    if board.returncode:
        raise ConfigError(
            f"TensorBoard exited with code {board.returncode}; check whether --port {flags.port} is in use"
        )
    return 0


def display_names(rows: list[RunRow], state: Path) -> dict[str, str]:
    """Return each run's name in TensorBoard: its setting and seed."""
    found = group_settings(gather_runs(rows, local_reader(state)))
    labels = {run.id: s.label for s in found for run in (*s.runs, *s.superseded_runs)}
    return {row["run"]: folder_name(f"{labels[row['run']]} seed {row.get('seed')}", row["run"]) for row in rows}


def compose_config(rows: list[RunRow], command: Command) -> Config:
    """Compose the config that gives access to these runs' bucket, from the overrides or else the table of runs.

    Raises:
        ConfigError: the runs are in several buckets.
    """
    if len({(row.get("cloud"), row.get("project"), row.get("bucket")) for row in rows}) > 1:
        raise ConfigError("these runs are in several buckets; choose one with --where bucket=NAME")
    if command.overrides:
        return command.options.cloud_config()
    overrides = [f"cloud={'local' if rows[0].get('cloud') == 'local' else 'gcp'}"]
    overrides += [f"cloud.project={quote_text(rows[0]['project'])}"] if rows[0].get("project") else []
    return sound(compose(overrides))

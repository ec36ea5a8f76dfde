"""`slipway tensorboard`: run TensorBoard with the curves of some runs, or of all runs of a sweep (docs/report.md)."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from conf.schema.config import Config
from controller.cli.main import Command
from controller.cli.verbs.look.runs import requested_runs
from controller.cloud.connect import open_context
from controller.config.compose import compose
from controller.core.errors import ConfigError
from controller.core.text import plural
from controller.records.index import RunRow
from controller.report.gather import gather_runs, local_reader
from controller.report.settings import group_settings
from controller.report.tensorboard_mirror import TensorBoardMirror, folder_name

REFRESH_SECONDS = 15.0


def run(command: Command) -> int:
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
        print(json.dumps(said) if flags.json else f"{plural(len(folders), 'run')} in {folder}; press Ctrl-C to stop")
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
    overrides += [f"cloud.project={rows[0]['project']}"] if rows[0].get("project") else []
    config, problems = compose(overrides)
    if config is None or problems:
        raise ConfigError(problems)
    return config

"""`slipway localcloud start|stop|wipe|env|requests`: manage the emulated cloud."""

import sys
from pathlib import Path

from conf.schema.infra.cloud import LocalCloud
from controller.cli.main import Command
from controller.cloud import emulator
from controller.config.compose import compose
from controller.core.errors import ConfigError
from controller.core.text import plural
from controller.core.ui import confirm
from controller.records import index


def run(command: Command) -> int:
    config, problems = compose([*command.overrides, "cloud=local"])
    if config is None or problems:
        raise ConfigError(problems)
    assert isinstance(config.cloud, LocalCloud)
    action = command.flags.action
    if action == "start":
        running = emulator.ensure_running(config.cloud, config.run.state_dir)
        print(f"the emulated cloud runs at {running.url}; `slipway localcloud env` prints the exports")
        return 0
    if action == "wipe" and not _confirm_wipe(config.run.state_dir, yes=command.flags.yes):
        raise ConfigError("nothing was deleted; pass --yes to skip the prompt")
    status, text = emulator.run_emulator_verb([action], emulator.state_folder(config.run.state_dir), show=True)
    sys.stderr.write(text)
    if action == "wipe" and status == 0:
        print("deleted: the emulated cloud with its buckets and pods; the table of runs and their metrics stay")
    return status


def _confirm_wipe(state_dir: str, *, yes: bool) -> bool:
    """Ask before the results of emulated runs are deleted; return whether to go on."""
    rows = index.load_rows(Path(state_dir).expanduser())
    count = sum(row.get("cloud") == "local" for row in rows)
    question = f"Delete the emulated cloud, and in its buckets the results of {plural(count, 'run')}?"
    return confirm(question, yes=yes)

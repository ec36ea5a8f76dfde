"""`slipway localcloud start|stop|wipe|env|requests`: manage the emulated cloud."""

import sys

from conf.schema.infra.cloud import LocalCloud
from controller.cli.main import Command
from controller.cloud import emulator
from controller.config.compose import compose
from controller.core.errors import ConfigError


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
    status, text = emulator.run_emulator_verb([action], emulator.state_folder(config.run.state_dir), show=True)
    sys.stderr.write(text)
    return status

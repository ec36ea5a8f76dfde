"""`slipway version`, `slipway --version`: print which Slipway this is."""

import json
from importlib.metadata import version

from controller.cli.main import Command


def run(command: Command) -> int:
    installed = version("slipway")
    print(json.dumps({"version": installed}) if command.flags.json else f"slipway {installed}")
    return 0

"""`slipway fit`: does the run fit the slice? The TPU compiler answers, in a child process that knows JAX."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from controller.errors import ConfigError
from controller.runfile import render

if TYPE_CHECKING:
    from controller.cli import Command


def run(command: Command) -> int:
    config = command.checked_config()
    if config.program.kind != "trainer":
        raise ConfigError("program: only the bundled trainer's programs are known; fit needs program=trainer")
    # where data lies is of no account for shapes
    anywhere = {name: name for _, name, _ in config.assets.each()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(render(config, config.run.name, "bucket", anywhere))
        flags = ["--json"] if command.flags.json else []
        return subprocess.run([sys.executable, "-P", "-m", "trainer.fit", str(file), *flags], check=False).returncode

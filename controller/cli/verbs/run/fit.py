"""`slipway fit`: check whether the run fits the slice, and how long it takes, with the TPU compiler.

The compiler runs in a child process, which imports JAX. The result for the config's own slice is kept for `plan`.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from conf.schema.config import Config
from controller.checks.fit import cache_file
from controller.cli.main import Command
from controller.config.run_yaml import render
from controller.core.errors import ConfigError
from controller.core.programs import own_program
from controller.gcp.prices import SPOT_TIERS


def run(command: Command) -> int:
    config = command.options.checked_config(without={"fit"}, resolve=False)
    if config.program.kind != "trainer":
        raise ConfigError("program: fit supports only the bundled trainer; set program=trainer")
    # the location of data does not affect shapes
    anywhere = {name: name for name in re.findall(r"assets://([^/\"]+)", config.model_dump_json())}
    with tempfile.TemporaryDirectory() as folder:
        file, answer = Path(folder) / "run.yaml", Path(folder) / "fit.json"
        file.write_text(render(config, config.run.name, "bucket", anywhere))
        flags = ["--out", str(answer), *(["--json"] if command.flags.json else []), *_price_flags(config)]
        if command.flags.slices:
            flags += ["--slices", command.flags.slices, "--sort", command.flags.sort]
        asked = own_program("trainer.fit", str(file), *flags)
        places = [*(str(Path.cwd() / name) for name in config.code.modules), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
        if sys.stderr.isatty() and not command.flags.json:
            print("compiling each program for the TPU; a large model takes minutes …", file=sys.stderr)
        code = subprocess.run(asked, env=environment, check=False).returncode
        if answer.is_file() and not command.flags.slices:
            kept = cache_file(config)
            try:
                kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                kept.write_text(answer.read_text())
            except OSError as error:
                raise ConfigError(f"run.state_dir: {kept.parent} cannot be written: {error.strerror}") from None
    return code


def _price_flags(config: Config) -> list[str]:
    """Return the zone and tier of the prices to show."""
    spot = ["--spot"] if config.tpu.capacity[0] in SPOT_TIERS else []
    return [*(["--zone", config.tpu.zone] if config.tpu.zone else []), *spot]

"""Starts Slipway's own programs: `own_program("controller.localcloud", "start")` is a command line.

`python -m` would not find them, because an installed Slipway is not on `sys.path`. Run as a file, this module
puts Slipway's packages first, so none of the current folder or of site-packages is taken for them.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def own_program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of Slipway as `python -m` would."""
    return [sys.executable, "-P", __file__, module, *arguments]


def run_program(module: str, *arguments: str, modules: Sequence[str] = ()) -> int:
    """Run a module with the terminal of this process, and return its exit code.

    Args:
        module: of Slipway.
        arguments: its command line.
        modules: folders that it can import from, relative to the current one.
    """
    places = [*(str(Path.cwd() / name) for name in modules), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    return subprocess.run(own_program(module, *arguments), env=environment, check=False).returncode


def main() -> None:
    del sys.argv[0]
    sys.path.insert(0, str(ROOT))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

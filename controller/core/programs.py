"""Starts Slipway's own programs: `own_program("controller.localcloud", "start")` is a command line.

`python -m` would not find them, because an installed Slipway is not on `sys.path`. Run as a file, this module
puts Slipway's packages first, so none of the current folder or of site-packages is taken for them.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def own_program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of Slipway as `python -m` would."""
    return [sys.executable, "-P", __file__, module, *arguments]


def main() -> None:
    del sys.argv[0]
    sys.path.insert(0, str(ROOT))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

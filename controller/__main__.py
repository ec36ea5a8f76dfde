"""`python -m controller`, the same as the console script `slipway`."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    os.umask(0o077)  # keys, tokens, logs and records are nobody else's on this machine
    _leave_out_the_working_directory()
    from controller.cli.main import run  # not before: it imports `conf`, and the folder one stands in may have its own

    return run(sys.argv[1:])


def _leave_out_the_working_directory() -> None:
    """`python -m` searches it first; the user's repository may hold packages named conf or trainer."""
    here = Path.cwd()
    if here != Path(__file__).resolve().parents[1]:
        sys.path[:] = [entry for entry in sys.path if Path(entry or here).resolve() != here]


if __name__ == "__main__":
    sys.exit(main())

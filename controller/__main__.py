"""`python -m controller`, the same as the console script `slipway`."""

import os
import sys
from pathlib import Path


def main() -> int:
    os.umask(0o077)  # no other user of this machine may read keys, tokens, logs and records
    _leave_out_the_working_directory()
    from controller.cli.main import run  # imports `conf`, which may exist in the working directory too

    return run(sys.argv[1:])


def _leave_out_the_working_directory() -> None:
    """Remove it from sys.path: `python -m` searches it first, and it may hold packages named conf or trainer."""
    here = Path.cwd()
    if here != Path(__file__).resolve().parents[1]:
        sys.path[:] = [entry for entry in sys.path if Path(entry or here).resolve() != here]


if __name__ == "__main__":
    sys.exit(main())

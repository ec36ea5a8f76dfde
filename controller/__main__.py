"""`python -m controller`, the same as the console script `slipway`."""

from __future__ import annotations

import sys

from controller.cli import run


def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

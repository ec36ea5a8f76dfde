"""`python -m slipway`, the same as the console script `slipway`."""

import sys

from .finder import find_own_packages


def main() -> int:
    find_own_packages()
    from controller.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())

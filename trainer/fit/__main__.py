"""`python -m trainer.fit`."""

import sys

from trainer.fit.report import main

if __name__ == "__main__":
    sys.exit(main())

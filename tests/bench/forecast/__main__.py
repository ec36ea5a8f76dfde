"""`python -m tests.bench.forecast`."""

from tests.bench.forecast.rows import main

if __name__ == "__main__":
    main()

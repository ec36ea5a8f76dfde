"""How long `slipway runs` takes over ten thousand records: the whole command, its imports included.

    python -m tests.bench.runs [--records 10000] [--repeat 5]

Prints wall and CPU seconds of each kind of question, the fastest of a few. Each run has two lines in the index, as in
life.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from controller.records import index

QUESTIONS = {
    "table": [],
    "filtered and sorted": ["--where", "metrics.accuracy_after>0.5", "--sort", "metrics.accuracy_after"],
    "json": ["--json"],
    "csv": ["--csv"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), options.records)
        environment = {**os.environ, "SLIPWAY_HOME": folder}
        result: dict[str, object] = {"records": options.records}
        for name, words in QUESTIONS.items():
            argv = [sys.executable, "-m", "slipway", "runs", *words]
            times = [_timed(argv, folder, environment) for _ in range(options.repeat)]
            wall, cpu = (round(min(column), 3) for column in zip(*times, strict=True))
            result[name] = {"wall_seconds": wall, "cpu_seconds": cpu}
    print(json.dumps(result | {"load_average": os.getloadavg()[0]}, indent=1))


def fill(state: Path, records: int) -> None:
    """As many runs as that: each begun, then finished."""
    for i in range(records):
        begun = {"run": f"quickstart-{i:08x}", "created": 1.7e9 + i, "project": "p", "bucket": "b", "sweep": ""}
        words = {"name": "quickstart", "seed": i, "overrides": ["+experiment=quickstart", f"run.seed={i}"]}
        pod = {"type": "v5litepod-16", "zone": "us-west4-a", "cloud": "local", "commit": "c" * 40, "code": "d" * 64}
        numbers = {"accuracy_before": 0.1, "accuracy_after": i / records, "reward_mean": 0.5, "steps": 100}
        ended = {"state": "finished", "seconds": 100.5, "attempts": 1, "usd": 0.5, "pods": [], "metrics": numbers}
        row = {**begun, **words, **pod}
        index.append_rows(state, [row | {"state": "running"}, row | ended])


def _timed(argv: list[str], folder: str, environment: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of one command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(argv, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, cpu


if __name__ == "__main__":
    main()

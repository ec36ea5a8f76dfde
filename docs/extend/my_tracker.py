"""Tracker: the rows of a run in a file of comma-separated values, one line a metric."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ToCsv:
    """Each step comes once, whatever interrupts the run; `folder` survives that too."""

    def __init__(self, run: str, config: Mapping[str, Any], folder: str) -> None:
        """Continue the file of this run; `config` has its settings, such as `seed`."""
        self._run, self._seed = run, config["seed"]
        self._path = Path(folder) / "metrics.csv"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a line for each metric of a step."""
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerows([self._run, self._seed, step, name, value] for name, value in metrics.items())

    def finish(self, results: Mapping[str, Any] | None) -> None:
        """Nothing is left to write."""

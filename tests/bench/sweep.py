"""What a sweep costs beside its programs: 100 tiny command programs over 8 emulated pods.

    python -m tests.bench.sweep [--runs 100] [--pods 8]

The programs themselves take no time (`true`), so that all of it is overhead. Of each run that is not the first of its
pod, since that one waits for the pod to be made:

- `run_seconds`: from the pod taking it to its end being on record, median and 90th percentile, by its clock;
- `seconds_per_run`: wall time in which these runs were done by their number, all pods together;

and of the whole sweep, pods being made and deleted included, the controller's processor time by runs, wall time times
pods by runs, and the controller's largest resident memory. Emulated pods share this machine with the controller.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from controller.cloud import emulator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--pods", type=int, default=8)
    options = parser.parse_args()
    print(json.dumps(measure(options.runs, options.pods), indent=1))


def measure(runs: int, pods: int) -> dict[str, Any]:
    """Carry the sweep through once."""
    with tempfile.TemporaryDirectory() as folder:
        home, here = Path(folder) / "home", Path(folder) / "repository"
        here.mkdir()
        (here / "a.txt").write_text("a\n")
        words = [
            "cloud=local",
            "program=command",
            "env.packages=image",
            "cloud.operation_seconds=0",
            "cloud.quotas={INSTANCES: 200}",
        ]
        words += ["tpu.accelerator_type=v5litepod-1", 'program.command=["true"]', f"sweep.pods={pods}"]
        argv = [sys.executable, "-m", "slipway", "-m", "--json", *words, f"run.seed=range(0,{runs})"]
        environment = {**os.environ, "SLIPWAY_HOME": str(home)}
        began = time.monotonic()
        controller = subprocess.Popen(argv, cwd=here, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            watched = Watched(controller)
            wall = time.monotonic() - began
        finally:
            controller.kill()
            controller.wait()
            emulator.run_emulator_verb(["wipe"], emulator.state_folder(str(home)))
    return watched.result(pods) | {
        "wall_seconds": round(wall, 1),
        "wall_times_pods_by_runs": round(wall * pods / runs, 3),
        "load_average": os.getloadavg()[0],
    }


class Watched:
    """What a sweep says while it lasts."""

    def __init__(self, controller: subprocess.Popen[str]) -> None:
        self.began: dict[str, tuple[int, float]] = {}
        self.ended: dict[str, float] = {}
        self.megabytes, self.controller_cpu = 0.0, 0.0
        self._process = psutil.Process(controller.pid)
        self._over = threading.Event()
        sampler = threading.Thread(target=self._sample, daemon=True)
        sampler.start()
        assert controller.stdout is not None
        for line in controller.stdout:
            said = json.loads(line)
            if said["state"] == "running":
                self.began.setdefault(said["run"], (said["pod"], said["time"]))
            elif said["state"] == "finished":
                self.ended[said["run"]] = said["time"]
        self._over.set()
        sampler.join()

    def result(self, pods: int) -> dict[str, Any]:
        order = sorted(self.ended, key=lambda run: self.began[run][1])
        first = {self.began[run][0]: run for run in reversed(order)}
        later = [run for run in order if run not in first.values()]
        took = [self.ended[run] - self.began[run][1] for run in later]
        span = max(self.ended.values()) - min(self.began[run][1] for run in later)
        return {
            "runs": len(self.ended),
            "pods": pods,
            "run_seconds": {
                "median": round(statistics.median(took), 3),
                "90 %": round(statistics.quantiles(took, n=10)[-1], 3),
            },
            "seconds_per_run": round(span / len(later), 3),
            "controller_cpu_seconds_per_run": round(self.controller_cpu / len(self.ended), 3),
            "controller_mb": round(self.megabytes),
        }

    def _sample(self) -> None:
        while not self._over.wait(0.2):
            try:
                self.megabytes = max(self.megabytes, self._process.memory_info().rss / 1e6)
                used = self._process.cpu_times()
                self.controller_cpu = used.user + used.system
            except psutil.NoSuchProcess:
                return


if __name__ == "__main__":
    main()

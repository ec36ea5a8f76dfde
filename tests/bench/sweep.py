"""What a sweep costs beside its programs: 100 tiny command programs over 8 emulated pods.

    python -m tests.bench.sweep [--runs 100] [--pods 8]

Prints wall time, seconds per run from when the first one has ended (the programs themselves take none), and the largest
resident memory of the controller.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from controller import emulator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--pods", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home, here = Path(folder) / "home", Path(folder) / "repository"
        here.mkdir()
        (here / "a.txt").write_text("a\n")
        environment = {**os.environ, "SLIPWAY_HOME": str(home)}
        words = ["cloud=local", "program=command", "env.packages=image", "cloud.operation_seconds=0"]
        words += ["tpu.accelerator_type=v5litepod-1", 'program.command=["true"]', f"sweep.pods={options.pods}"]
        argv = [sys.executable, "-m", "controller", "-m", "--json", *words, f"run.seed=range(0,{options.runs})"]
        began, largest, finished = time.monotonic(), 0, []
        controller = subprocess.Popen(argv, cwd=here, env=environment, stdout=subprocess.PIPE, text=True)
        process = psutil.Process(controller.pid)
        assert controller.stdout is not None
        for line in controller.stdout:
            largest = max(largest, process.memory_info().rss)
            if json.loads(line)["state"] == "finished":
                finished.append(time.monotonic() - began)
        wall = time.monotonic() - began
        controller.wait()
        emulator.command(["wipe"], emulator.state_folder(str(home)))
    first = finished[0] if finished else 0.0
    last = finished[-1] if finished else 0.0
    result = {
        "runs": len(finished),
        "pods": options.pods,
        "wall_seconds": round(wall, 1),
        "until_the_first_run_ended": round(first, 1),
        "overhead_seconds_per_run": round((last - first) / max(1, len(finished) - 1), 3),
        "wall_seconds_per_run": round(wall / max(1, len(finished)), 3),
        "controller_mb": round(largest / 1e6),
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

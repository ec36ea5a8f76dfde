"""How soon the controller sees what has happened to a run, and how soon that trains again; for docs/performance.md.

    python -m tests.bench.recovery [--repeat 3] [--only preempted,killed]

The bundled trainer on two workers of an emulated cloud whose operations take no time, so that what is measured is our
own. Each time the run is cut off once it trains again. Not run by pytest.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from controller.emulator import run_emulator_verb, state_folder
from tests.bench.fleet import table
from tests.planes import PLANES
from tests.scenarios.recovery.test_noticed import SHORT

WORDS = [*SHORT, *PLANES[0].two, "loop.steps=100000", "checkpoint.save_interval=20"]
FAULTS = {
    "preempted": "kind: preempted",
    "preempted, announced 25 s before": "kind: preempted, notice_seconds: 25",
    "killed": "kind: killed, worker: 1",
    "frozen": "kind: frozen, worker: 1",
    "silent": "kind: ssh_frozen, seconds: 600, worker: 1",
}
VERDICTS = ("preempted: ", "worker lost: ", "hung: ")


@dataclass
class Recovered:
    """Seconds after the fault struck (a notice: was given)."""

    seen: float
    stepped: float
    lost: int
    """Steps that were computed again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", help="some of: preempted, announced, killed, frozen, silent")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, median of {options.repeat}\n")
    rows = []
    for name, fault in FAULTS.items():
        if options.only and not any(word in name for word in options.only.split(",")):
            continue
        found = [met(fault) for _ in range(options.repeat)]
        middle = [statistics.median(values) for values in zip(*((f.seen, f.stepped) for f in found), strict=True)]
        rows.append([name, *(f"{seconds:.1f}" for seconds in middle), str(max(f.lost for f in found))])
        print(name, found, f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    table(["what happens", "s until it is seen", "s until the first new step", "steps computed again, at most"], rows)


def met(fault: str) -> Recovered:
    """One run that meets a fault after its first checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        repository, home = Path(folder, "repository"), Path(folder, "home")
        repository.mkdir()
        script = f"cloud.faults=[{{{fault}, after_object: checkpoints/20/commit_success}}]"
        up = subprocess.Popen(
            [sys.executable, "-P", "-m", "slipway", "up", "--json", *WORDS, script],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=repository,
            env={**os.environ, "SLIPWAY_HOME": str(home)},
        )  # fmt: skip
        try:
            assert up.stdout is not None
            return followed(up.stdout, home / "localcloud")
        finally:
            up.kill()
            up.wait()
            run_emulator_verb(["wipe"], state_folder(str(home)))


def followed(events: Iterator[str], cloud: Path) -> Recovered:
    """Until the first step after the fault that was not computed before it."""
    seen, computed, last = 0.0, {}, 0
    for event in map(json.loads, events):
        if event["kind"] == "note" and event["message"].startswith(VERDICTS) and not seen:
            seen, last = datetime.fromisoformat(event["time"]).timestamp(), max(computed)
        line: dict[str, Any] = event.get("metrics", {})
        if line.get("phase") != "train":
            continue
        if seen and line["time"] > seen and line["step"] > last:
            began = struck(cloud)
            return Recovered(
                round(seen - began, 2), round(line["time"] - began, 2), last + 1 - first_again(computed, seen)
            )
        computed.setdefault(line["step"], []).append(line["time"])
    raise RuntimeError("the run ended before it had met the fault")


def first_again(computed: dict[int, list[float]], seen: float) -> int:
    """The first step that was computed after the fault."""
    return min(
        (step for step, times in computed.items() if any(time > seen for time in times)), default=max(computed) + 1
    )


def struck(cloud: Path) -> float:
    """When the fault struck, by the emulated cloud."""
    from controller.localcloud import lifecycle

    fault = next(
        iter(json.loads(lifecycle.request_admin(lifecycle.require_endpoint(cloud), "GET", "state"))["fault"].values())
    )
    return fault["due"]


if __name__ == "__main__":
    main()

"""A study under misfortune: 12 runs of the quick start, scaled down, are the same runs as alone, to the last bit.

    python -m tests.bench.study [--seed 0] [--preemptions 3] [--type v5litepod-1] [--keep FOLDER]

4 settings x 3 seeds over 2 emulated pods. Pods are taken back at random moments, and the controller is killed twice
(SIGKILL) and started again by the same words. Meanwhile each run is made alone, on an emulated cloud of its own. Then
one run is repeated from its record (`up --run`), from a clean clone of this repository at another commit, whose trainer
is another one. Compared is every array of the last checkpoint, those of the optimizer included. 10 to 40 minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from controller.cli import main as cli
from controller.cloud import emulator
from controller.records import index
from tests.paths import ROOT
from tests.scenarios.experiments.test_quickstart import client, weights

WORDS = ("+experiment=quickstart", "scale=tiny")
SETTINGS = ("optimizer.lr=1e-3,7e-3", "loop.entropy_coef=0.01,0.05", "run.seed=0,1,2")
"""Without a bonus the scaled-down policy, which is never right, would learn nothing, and all would end alike."""
KILLED_AFTER = (2, 6)
"""So many runs that have finished the controller is killed."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which pods are taken back")
    parser.add_argument("--preemptions", type=int, default=3)
    parser.add_argument("--type", default="v5litepod-1")
    parser.add_argument("--keep", help="a folder to work in, which stays")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study = Study(Path(options.keep or folder), (*WORDS, f"tpu.accelerator_type={options.type}"))
        try:
            print(json.dumps(study.carry_out(random.Random(options.seed), options.preemptions), indent=1))
        finally:
            study.wipe()


class Study:
    def __init__(self, folder: Path, words: tuple[str, ...]) -> None:
        self.words, self.folder = words, folder
        self.swept, self.alone = folder / "swept", folder / "alone"
        self.log = folder / "said.txt"
        for home in (self.swept, self.alone):
            home.mkdir(parents=True, exist_ok=True)
        self.took: dict[str, float] = {}
        self.preempted = 0

    def carry_out(self, draw: random.Random, preemptions: int) -> dict[str, Any]:
        began = time.monotonic()
        alone = threading.Thread(target=self._make_alone, daemon=True)
        alone.start()
        over = threading.Event()
        trouble = threading.Thread(target=self._preempt, args=(draw, preemptions, over), daemon=True)
        trouble.start()
        codes = [self._sweep(kill_after=count) for count in (*KILLED_AFTER, None)]
        over.set()
        trouble.join()
        swept = time.monotonic() - began
        arrays = {run: arrays_of(self.swept, self.words, run) for run in finished(self.swept)}
        again = self._repeat_from_a_clone(next(iter(arrays)))
        repeated = arrays_of(self.swept, self.words, again)
        alone.join()
        lone = {run: arrays_of(self.alone, self.words, run) for run in finished(self.alone)}
        equal = [run for run in arrays if arrays[run] == lone.get(run)]
        attempts = {row["run"]: row.get("attempts", 0) for row in index.load_rows(self.swept)}
        return {
            "runs": len(arrays),
            "exit codes of the controllers": codes,
            "preemptions": self.preempted,
            "attempts": sum(attempts[run] for run in arrays),
            "bit-identical to the same run alone": len(equal),
            "arrays compared in each": len(next(iter(arrays.values()))),
            "different sets of arrays": len({json.dumps(found, sort_keys=True) for found in arrays.values()}),
            "repeated from a clone": {again: repeated == arrays[again.removesuffix("-r1")]},
            "sweep_seconds": round(swept),
            "alone_seconds_each": round(sum(self.took.values()) / len(self.took)),
            "load_average": os.getloadavg()[0],
        }

    def wipe(self) -> None:
        for home in (self.swept, self.alone):
            emulator.run_emulator_verb(["wipe"], emulator.state_folder(str(home)))

    def _sweep(self, kill_after: int | None) -> int:
        """One controller of the sweep, to its end or to its death; the exit code."""
        controller = self._start(self.swept, "-m", *self.words, *SETTINGS, "sweep.pods=2")
        while controller.poll() is None:
            if kill_after is not None and len(finished(self.swept)) >= kill_after:
                controller.kill()
            time.sleep(0.2)
        return controller.returncode

    def _preempt(self, draw: random.Random, times: int, over: threading.Event) -> None:
        """All pods are taken back, some random time after one of them has begun to train."""
        while self.preempted < times and not over.is_set():
            running = sum(row.get("state") == "running" for row in index.load_rows(self.swept))
            if not running or over.wait(draw.uniform(5, 60)):
                over.wait(0.5)
                continue
            fault = {"key": f"preemption {self.preempted}", "faults": [{"kind": "preempted", "after_seconds": 0}]}
            cloud(self.swept, self.words).post("faults", fault)
            self.preempted += 1

    def _make_alone(self) -> None:
        """Every run by an `up` of its own, on another cloud; they take turns on its pod."""
        for lr in values(SETTINGS[0]):
            for bonus in values(SETTINGS[1]):
                for seed in values(SETTINGS[2]):
                    began = time.monotonic()
                    up = self._start(self.alone, "up", *self.words, lr, bonus, seed, "cleanup.on_success=keep")
                    assert up.wait() == 0, self.log
                    self.took[f"{lr} {bonus} {seed}"] = time.monotonic() - began

    def _repeat_from_a_clone(self, run: str) -> str:
        """The id of the repetition."""
        clone = self.folder / "clone"
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run([*git, "clone", "--quiet", str(ROOT), str(clone)], check=True)
        file = clone / "trainer" / "mesh.py"
        file.write_text(f"{file.read_text()}\n# another version of the trainer\n")
        subprocess.run([*git, "commit", "--quiet", "--all", "--message", "another trainer"], cwd=clone, check=True)
        up = self._start(self.swept, "up", "--run", run, "tpu.name=repeats", cwd=clone)
        assert up.wait() == 0, self.log
        return f"{run}-r1"

    def _start(self, home: Path, *words: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        environment = {**os.environ, "SLIPWAY_HOME": str(home), "PYTHONPATH": str(cwd or ROOT)}
        with self.log.open("a") as log:
            argv = [sys.executable, "-m", "slipway", *words]
            return subprocess.Popen(argv, cwd=cwd or home, env=environment, stdout=log, stderr=log, text=True)


def values(words: str) -> list[str]:
    """`a=1,2` as `a=1` and `a=2`."""
    key, _, each = words.partition("=")
    return [f"{key}={value}" for value in each.split(",")]


def finished(home: Path) -> list[str]:
    return [row["run"] for row in index.load_rows(home) if row.get("state") == "finished"]


def cloud(home: Path, words: tuple[str, ...]) -> emulator.Emulator:
    """The emulated cloud of a state folder, awake."""
    config = cli.parse(["up", *words]).options.config()[0]
    return emulator.ensure_running(config.cloud, str(home))  # pyright: ignore[reportArgumentType]


def arrays_of(home: Path, words: tuple[str, ...], run: str) -> dict[str, str]:
    """By name the SHA-256 of every array of the last checkpoint in the bucket."""
    target = home / "checkpoints" / run
    google = client(cloud(home, words))
    [bucket] = {row["bucket"] for row in index.load_rows(home)}
    for item in google.list_all("storage", "objects.list", "items", bucket=bucket, prefix=f"runs/{run}/checkpoints/"):
        file = target / item["name"].removeprefix(f"runs/{run}/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(google.download(bucket, item["name"]))
    google.close()
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in weights(target).items()}


if __name__ == "__main__":
    main()

"""What the checks for silent corruption cost: CPU and wall time of updates with and without them, in turns.

    python -m tests.bench.checks [--devices 2] [--processes 1] [--rounds 9] [--steps 200] [--interval 10]

The model and the batch are those of `lm_tinyshakespeare`, on a text that is made up here. With one process all turns
run the same compiled programs there. With several, each turn starts them on loopback, a device each, so the exchange
between them counts too; its time is from the first line of metrics to the last, CPU time from the former to the end. A
ratio is the geometric mean over the rounds of one round's ratio, with a 95 % interval (Student's t on its logarithm).
Every run ends with the same loss, or this fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
import scipy
import yaml

from tests.bench.asynchronous import cpu_of_tree
from tests.groups import load_group
from tests.paths import ROOT
from tests.trainer.conftest import make_lm_run
from tests.trainer.lives import SharedPrograms, train
from tests.trainer.processes import start_trainer, wait_processes
from trainer.loops.updates import UpdateLoop

LOG_INTERVAL = 10
RUN_SECONDS = 540.0

Spent = tuple[float, float]
"""CPU and wall seconds of a run's updates."""
Run = tuple[list[float], Spent]
"""Losses, and what the updates took."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--interval", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if options.processes > 1:
            os.environ.setdefault("XLA_FLAGS", "")
            options.devices = options.processes
            run = partial(run_processes, options, Path(folder) / "compiled")
        else:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", options.devices)
            SharedPrograms().install(patch)
            run = partial(run_here, measured(patch))
        rows = [turn(options, Path(folder), i, run) for i in range(-1, options.rounds)][1:]  # the first one compiles
    skipped = LOG_INTERVAL if options.processes > 1 else 0  # updates before the first line of metrics
    where = f"{options.processes} processes, {options.devices} devices"
    print(f"{where}, a check every {options.interval} updates, load {os.getloadavg()[0]:.1f}")
    for place, what in enumerate(("CPU", "wall")):
        usual = statistics.median(row[0][place] for row in rows) / (options.steps - skipped)
        ratio, low, high = interval([row[1][place] / row[0][place] for row in rows])
        print(f"{what}: {1e3 * usual:.2f} ms per update without; with: {ratio:.4f} times ({low:.4f} to {high:.4f})")


def turn(options: argparse.Namespace, folder: Path, number: int, run: Any) -> list[Spent]:
    """Return what the updates took without and with the checks, in this round."""
    losses, found = {}, {}
    for on in [False, True] if number % 2 else [True, False]:
        place = folder / f"{number}-{on}"
        place.mkdir()
        losses[on], found[on] = run(shakespeare(options, place, on), place)
    assert losses[False] == losses[True], json.dumps(losses)
    return [found[False], found[True]]


def measured(patch: pytest.MonkeyPatch) -> list[Spent]:
    """Return a list that gets the time of every run's updates in this process, without their compilation."""
    spent: list[Spent] = []
    run = UpdateLoop.run

    def timed(loop: UpdateLoop, state: Any, first: int) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        run(loop, state, first)
        spent.append((time.process_time() - cpu, time.perf_counter() - wall))

    patch.setattr(UpdateLoop, "run", timed)
    return spent


def run_here(spent: list[Spent], raw: dict[str, Any], folder: Path) -> Run:
    lines = train(raw, folder / "local")
    return [line["loss"] for line in lines if "loss" in line], spent[-1]


def run_processes(options: argparse.Namespace, cache: Path, raw: dict[str, Any], folder: Path) -> Run:
    """Run the trainer as a process for each worker. Raises AssertionError if one fails."""
    raw["pod"]["workers"] = options.processes
    environment = {"JAX_NUM_CPU_DEVICES": "1"}
    started = start_trainer(raw, folder, str(cache), *[environment] * options.processes)
    metrics, late = folder / "worker-0/metrics.jsonl", time.monotonic() + RUN_SECONDS
    while not (metrics.exists() and metrics.read_text().endswith("\n")):
        assert started[0].poll() is None, started[0].communicate()[1]
        assert time.monotonic() < late, "no update"
        time.sleep(0.02)
    before, ended = sum(cpu_of_tree(process.pid) for process in started), os.times()
    assert {one.exit_code for one in wait_processes(started, RUN_SECONDS)} == {0}
    after = os.times()
    cpu = after.children_user + after.children_system - ended.children_user - ended.children_system - before
    lines = [line for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
    return [line["loss"] for line in lines], (cpu, lines[-1]["time"] - lines[0]["time"])


def shakespeare(options: argparse.Namespace, folder: Path, on: bool) -> dict[str, Any]:
    values = yaml.safe_load((ROOT / "conf/experiment/lm_tinyshakespeare.yaml").read_text())
    raw = make_lm_run(folder)
    sizes = values["model"] | {"vocab_size": 256}
    loop = values["loop"] | {"steps": options.steps, "eval_interval": 10**6, "eval_batches": 1}
    del loop["text_samples"]
    often = {"verify_interval": options.interval if on else 0, "verify_data": on, "save_interval": 10**6}
    return raw | {
        "pod": raw["pod"] | {"devices": options.devices},
        "model": load_group("model/gpt2") | sizes,
        "loop": raw["loop"] | loop,
        "checkpoint": raw["checkpoint"] | often,
        "logging": raw["logging"] | {"log_interval": LOG_INTERVAL},
    }


def interval(ratios: list[float]) -> tuple[float, float, float]:
    logs = [math.log(ratio) for ratio in ratios]
    half = scipy.stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.mean(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


if __name__ == "__main__":
    main()

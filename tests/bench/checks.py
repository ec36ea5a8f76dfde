"""What the checks for silent corruption cost: CPU and wall time of updates with and without them, in turns.

    python -m tests.bench.checks [--devices 2] [--rounds 9] [--steps 200] [--interval 10]

The model and the batch are those of `lm_tinyshakespeare`, on a text that is made up here. All turns run the same
compiled programs in one process. A ratio is the geometric mean over the rounds of one round's ratio, with a 95 %
interval (Student's t on its logarithm). Every run ends with the same loss, or this fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import pytest
import scipy
import yaml

from tests.groups import load_group
from tests.paths import ROOT
from tests.trainer.conftest import make_lm_run
from tests.trainer.lives import SharedPrograms, train
from trainer.loops.updates import UpdateLoop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--interval", type=int, default=10)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        SharedPrograms().install(patch)
        spent = measured(patch)
        rows = [turn(options, Path(folder), i, spent) for i in range(-1, options.rounds)][1:]  # the first one compiles
    print(f"{options.devices} devices, a check every {options.interval} updates, load {os.getloadavg()[0]:.1f}")
    for place, what in enumerate(("CPU", "wall")):
        usual = statistics.median(row[0][place] for row in rows) / options.steps
        ratio, low, high = interval([row[1][place] / row[0][place] for row in rows])
        print(f"{what}: {1e3 * usual:.2f} ms per update without; with: {ratio:.4f} times ({low:.4f} to {high:.4f})")


def measured(patch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Seconds of CPU and wall time of every run's updates, without their compilation."""
    spent: list[tuple[float, float]] = []
    run = UpdateLoop.run

    def timed(loop: UpdateLoop, state: Any, first: int) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        run(loop, state, first)
        spent.append((time.process_time() - cpu, time.perf_counter() - wall))

    patch.setattr(UpdateLoop, "run", timed)
    return spent


def turn(
    options: argparse.Namespace, folder: Path, number: int, spent: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return what the updates took without and with the checks, in this round."""
    losses, found = {}, {}
    for on in [False, True] if number % 2 else [True, False]:
        place = folder / f"{number}-{on}"
        place.mkdir()
        lines = train(shakespeare(options, place, on), place / "local")
        losses[on], found[on] = [line.get("loss") for line in lines], spent[-1]
    assert losses[False] == losses[True], json.dumps(losses)
    return [found[False], found[True]]


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
        "logging": raw["logging"] | {"log_interval": 10},
    }


def interval(ratios: list[float]) -> tuple[float, float, float]:
    logs = [math.log(ratio) for ratio in ratios]
    half = scipy.stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.mean(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


if __name__ == "__main__":
    main()

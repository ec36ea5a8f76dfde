"""A step of GRPO, in turns with TRL and Tunix, on the same cores: wall time and CPU time.

    python -m tests.bench.peers.grpo [--trl PYTHON] [--tunix PYTHON] [--rounds 7] [--steps 15] [--cores 0,1] [--loaded]

--trl, --tunix: a Python that has the library; one that is not given or lacks it is left out, and a line says so. Model
(that of `tests.bench.grpo`), prompts, samples and tokens have the same sizes: 4 prompts x 8 samples, 64 + 64 tokens,
random weights, float32. Idle cores, rounds and intervals are as in `tests.bench.lm`. A round's value is the median of
its steps. Linux only: taskset.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.bench import grpo, lm
from tests.paths import ROOT

PEERS = {"trl": "trl_grpo.py", "tunix": "tunix_grpo.py"}
WARM_STEPS = 3
QUANTITIES = {"seconds": "seconds of a step", "cpu": "CPU seconds of a step"}

Values = dict[str, float]
"""Of one program in one round, by quantity."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--loaded", action="store_true")
    options = parser.parse_args()
    peers = {name: python for name in PEERS if (python := usable(name, getattr(options, name)))}
    with tempfile.TemporaryDirectory() as folder:
        rounds = [turn(options, peers, i, Path(folder) / str(i)) for i in range(options.rounds)]
    about = "on a LOADED machine: not a result" if options.loaded else "on idle cores"
    print(f"{options.rounds} rounds of {options.steps} steps, {about}; median, lowest and highest:")
    for line in table(rounds):
        print(line)


def usable(name: str, python: Path | None) -> Path | None:
    """Return that Python if it has the library; else print why it is left out."""
    if python is None:
        print(f"{name} is left out: --{name} names no Python")
        return None
    command = [str(python), "-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"]
    try:
        found = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError as error:
        print(f"{name} is left out: {error}")
        return None
    if not found:
        print(f"{name} is left out: {python} has no module {name}")
    return python if found else None


def table(rounds: Sequence[dict[str, Values]]) -> list[str]:
    """Lines of all programs' values, then of our ratio to each of the others."""
    lines = []
    for key, title in QUANTITIES.items():
        for program in rounds[0]:
            values = [each[program][key] for each in rounds]
            label = f"{program}, {title}"
            lines.append(f"{label:<34}{statistics.median(values):12.4f}{min(values):12.4f}{max(values):12.4f}")
    for key, title in QUANTITIES.items():
        for program in rounds[0]:
            if program != "slipway":
                pairs = [[each[name][key] for each in rounds] for name in ("slipway", program)]
                mean, low, high = lm.ratio(*pairs)
                lines.append(f"{title}, of {program}'s: {mean:.3f} (95 %: {low:.3f} to {high:.3f})")
    return lines


def turn(options: argparse.Namespace, peers: dict[str, Path], number: int, folder: Path) -> dict[str, Values]:
    """One round of all programs; each round begins with the next one."""
    names = ["slipway", *peers]
    found: dict[str, Values] = {}
    for name in names[number % len(names) :] + names[: number % len(names)]:
        if not options.loaded:
            lm.wait_until_idle(options.cores)
        found[name] = ours(options, folder) if name == "slipway" else theirs(options, name, peers[name])
    return {name: found[name] for name in names}


def ours(options: argparse.Namespace, folder: Path) -> Values:
    """Values of the trainer, as it runs on a worker with one device."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(grpo.run_file(options.steps + WARM_STEPS, folder)))
    env = grpo.environment() | {"SLIPWAY_RUN_DIR": str(folder / "local")}
    timed = f"from tests.bench import lm; lm.timed_trainer({str(folder / 'cpu.json')!r}, 'grpo')"
    command = ["taskset", "-c", options.cores, sys.executable, "-c", timed, str(folder / "run.yaml")]
    subprocess.run(command, env=env, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "local/metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_time"] for line in lines if line["phase"] == "grpo"][WARM_STEPS:]
    cpu = json.loads((folder / "cpu.json").read_text())[WARM_STEPS - 1 :]
    steps = cpu[-1]["step"] - cpu[0]["step"]
    return {"seconds": statistics.median(seconds), "cpu": (cpu[-1]["cpu"] - cpu[0]["cpu"]) / steps}


def theirs(options: argparse.Namespace, name: str, python: Path) -> Values:
    """What the other program says of itself."""
    script = Path(__file__).with_name(PEERS[name])
    command = ["taskset", "-c", options.cores, str(python), str(script), "--steps", str(options.steps)]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: exit code {done.returncode}:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return {"seconds": statistics.median(result["seconds"]), "cpu": result["cpu_seconds_per_step"]}


if __name__ == "__main__":
    main()

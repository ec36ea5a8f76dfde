"""Does GRPO learn, and what do its parts do? Held-out accuracy of `+experiment=arithmetic`, some seeds of each variant.

    python -m tests.bench.learning FOLDER [--seeds 5] [--cores 0,1] [--only NAME ...] [key=value ...]

Each run is the trainer by itself, one after another, on the cores given; FOLDER takes what they leave, and runs that
are done there are not made again. Prints a table, and writes FOLDER/curves.json for tests/bench/plot_learning.py.
A run's line also says
when an evaluation during training first found LEVEL, in seconds from the start of the process, compilation included.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.bench import grpo

VARIANTS = {
    "grpo": (),
    "no KL": ("loop.kl_coef=0.0",),
    "no clip": ("loop.clip_ratio_low=null", "loop.clip_ratio_high=null"),
    "ddof 1": ("loop.advantage_std=sample",),
    "no deviation": ("loop.advantage_std=none",),
    "Dr. GRPO": ("loop=dr_grpo",),
    "token mean": ("loop=token_mean",),
}
"""What differs from the experiment."""
LEVEL = 0.95
"""Held-out accuracy whose time a run's line tells."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--only", action="append", choices=VARIANTS)
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args()
    curves: dict[str, list[dict[str, Any]]] = {}
    for name in options.only or VARIANTS:
        for seed in range(options.seeds):
            folder = options.folder / name.replace(" ", "_") / str(seed)
            curves.setdefault(name, []).append(curve(name, seed, options, folder))
            print(told(name, seed, curves[name][-1]), flush=True)
    print(table(curves))
    (options.folder / "curves.json").write_text(json.dumps(curves) + "\n")


def curve(name: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Updates of GRPO and accuracies [n] of a run; its seconds from start to end, and those of a core that it took."""
    done = folder / "done.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = ["+experiment=arithmetic", f"run.seed={seed}", *VARIANTS[name], *options.words]
        (folder / "run.yaml").write_text(yaml.safe_dump(run_file(words, folder)))
        env = grpo.environment() | {"SLIPWAY_RUN_DIR": str(folder / "local")}
        command = ["taskset", "-c", options.cores, sys.executable, "-m", "trainer", str(folder / "run.yaml")]
        started, began, before = time.time(), time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        with (folder / "log").open("w") as log:
            subprocess.run(command, env=env, cwd=folder, check=True, stdout=log, stderr=log)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        done.write_text(json.dumps({"began": started, "seconds": time.perf_counter() - began, "cpu_seconds": cpu}))
    lines = [json.loads(line) for line in (folder / "local/metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "local/summary.json").read_text())
    warm = summary["warm_start_steps"]
    evaluated = [(line["step"] - warm, line["eval_accuracy"]) for line in lines if line["phase"] == "eval"]
    points = [(0, summary["accuracy_before"]), *(point for point in evaluated if point[0] > 0)]
    taken = json.loads(done.read_text())
    return {"points": points, "seconds_to_level": seconds_to_level(lines, taken.get("began"))} | taken


def seconds_to_level(lines: list[dict[str, Any]], began: float | None) -> float | None:
    """Return when an evaluation first found LEVEL; None if none did, or the beginning is not known."""
    times = [line["time"] for line in lines if line["phase"] == "eval" and line["eval_accuracy"] >= LEVEL]
    return times[0] - began if times and began is not None else None


def run_file(words: list[str], folder: Path) -> dict[str, Any]:
    """The experiment's run.yaml, on this machine's CPU."""
    from controller.config.compose import compose
    from controller.config.run_yaml import render

    config, problems = compose(words)
    assert config is not None, problems
    return yaml.safe_load(render(config, "bench", "bucket", {})) | {"dir": str(folder / "run")}


def told(name: str, seed: int, found: dict[str, Any]) -> str:
    """One run, as a line."""
    accuracies = [f"{accuracy:.3f}" for _, accuracy in found["points"]]
    seconds = f"{found['seconds']:.0f} s ({found['cpu_seconds']:.0f} of a core)"
    reached = "" if found["seconds_to_level"] is None else f", {LEVEL} after {found['seconds_to_level']:.0f} s"
    return f"{name}, seed {seed}: {' '.join(accuracies)} in {seconds}{reached}"


def table(curves: dict[str, list[dict[str, Any]]]) -> str:
    """Medians over the seeds, as Markdown."""
    rows = ["| variant | before | after | least | seconds | of a core |", "| --- | --- | --- | --- | --- | --- |"]
    for name, runs in curves.items():
        before = statistics.median(run["points"][0][1] for run in runs)
        after = [run["points"][-1][1] for run in runs]
        seconds, cpu = (statistics.median(run[key] for run in runs) for key in ("seconds", "cpu_seconds"))
        told = f"{before:.3f} | {statistics.median(after):.3f} | {min(after):.3f} | {seconds:.0f} | {cpu:.0f}"
        rows.append(f"| {name} | {told} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()

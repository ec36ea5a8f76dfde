"""Samplers on workers of their own beside sampling and training in turns: wall time, CPU time and accuracy.

    python -m tests.bench.asynchronous FOLDER [--seeds 5] [--steps 150] [--reward-seconds S] [--kill-every SECONDS]

Four processes on loopback run the quick start's task, a device each. In turns, all four sample and train. Asynchronous,
two train and two sample, with `loop.async_depth=2` and corrections by `rollout_is=token`. Both have the same seeds,
data and number of reward processes. Wall seconds are from the first update of GRPO to the last, without evaluations;
CPU seconds are those of all processes from the first update to the end of the run, without the reward processes of
samplers that were killed. WORDs are added to the quick start.

--reward-seconds adds a reward that waits, as a sandbox or a judge does. --kill-every kills a sampler at random, at
exponential intervals with this mean, and then checks the journal and that its replay has the same weights. A run that
FOLDER has already, with the same options and WORDs, is not repeated; one that was broken off begins anew. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

import yaml

from tests.trainer.processes import children, start_trainer, wait_processes

WORKERS, SAMPLERS, DEPTH, REWARD_PROCESSES = 4, 2, 2, 32
MODES = {
    "in turns": [],
    "asynchronous": [f"loop.sampler.workers={SAMPLERS}", f"loop.async_depth={DEPTH}",
                     "loop.rollout_correction.rollout_is=token"],
}  # fmt: skip
RUN_SECONDS = 480.0
SECONDS_VARIABLE = "SLIPWAY_BENCH_REWARD_SECONDS"


def wait(response: str, answer: str) -> float:
    """A reward that waits and is the same for every response, so that no advantage changes."""
    time.sleep(float(os.environ[SECONDS_VARIABLE]))
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--reward-seconds", type=float, default=0.0)
    parser.add_argument("--kill-every", type=float, help="mean seconds between kills; only asynchronous runs")
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args()
    os.environ.setdefault("XLA_FLAGS", "")
    os.environ["JAX_PLATFORMS"] = "cpu"
    modes = ["asynchronous"] if options.kill_every else list(MODES)
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    for seed in range(options.seeds):
        for mode in modes:
            found[mode].append(measure(mode, seed, options))
            print(f"{mode}, seed {seed}: {json.dumps(found[mode][-1])}", flush=True)
    print(table(found))


def measure(mode: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run, and with --kill-every its journal and replay; what FOLDER has is read instead."""
    kind = f"killed-{options.kill_every:g}" if options.kill_every else mode.replace(" ", "-")
    words = "".join(f"-{re.sub('[^a-zA-Z0-9.=-]', '_', word)}" for word in options.words)
    name = f"{kind}-reward-{options.reward_seconds:g}-steps-{options.steps}{words}-{seed}"
    folder = (options.folder / name).resolve()
    done = folder / "done.json"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)  # the trainer would resume what is there
        run = run_file(mode, seed, options, folder)
        found = watch(run, folder, options, random.Random(seed) if options.kill_every else None)
        if options.kill_every:
            check_journal(run)
            check_replay(run, folder, options)
        done.write_text(json.dumps(found | {"load": round(os.getloadavg()[0], 1)}) + "\n")
    return json.loads(done.read_text())


def run_file(mode: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The run's file, on a CPU device for each worker."""
    from controller.config.compose import compose
    from controller.config.run_yaml import render

    per_sampler = REWARD_PROCESSES // (SAMPLERS if mode == "asynchronous" else WORKERS)
    words = ["+experiment=quickstart", f"run.seed={seed}", f"loop.steps={options.steps}", *MODES[mode]]
    words += [f"optimizer.schedule.horizon_steps={options.steps}", f"loop.eval_interval={options.steps}"]
    words += [f"loop.reward_workers={per_sampler}", "logging.log_interval=1", "loop.test_samples_per_prompt=null"]
    config, problems = compose([*words, *options.words])
    assert config is not None, problems
    raw = yaml.safe_load(render(config, "bench", "bucket", {}))
    if options.reward_seconds:
        raw["loop"]["rewards"] |= {"tests.bench.asynchronous:wait": 1.0}
    return raw | {"dir": str(folder / "run"), "pod": raw["pod"] | {"workers": WORKERS, "devices": WORKERS}}


def start(run: dict[str, Any], folder: Path, options: argparse.Namespace) -> list[Popen[str]]:
    own = {"SLIPWAY_SAMPLER_TOKEN": "of the bench", "SLIPWAY_COORDINATOR": "127.0.0.1:8476",
           "JAX_NUM_CPU_DEVICES": "1", SECONDS_VARIABLE: str(options.reward_seconds)}  # fmt: skip
    return start_trainer(run, folder, str(options.folder.resolve() / "compiled"), *[own] * run["pod"]["workers"])


def watch(
    run: dict[str, Any], folder: Path, options: argparse.Namespace, chance: random.Random | None
) -> dict[str, Any]:
    """Run it. chance: when, from the first update on, which sampler is killed; None: none is."""
    before, kills, due, cpu_before = cpu_of_ended(), 0, 0.0, None
    started, late = start(run, folder, options), time.monotonic() + RUN_SECONDS
    metrics = folder / "worker-0/metrics.jsonl"
    while started[0].poll() is None and time.monotonic() < late:
        if cpu_before is None and metrics.exists() and '"phase": "grpo"' in metrics.read_text():
            cpu_before = sum(cpu_of_tree(process.pid) for process in started)
            due = time.monotonic() + (chance.expovariate(1 / options.kill_every) if chance else 0)
        if chance and cpu_before is not None and time.monotonic() >= due:
            for pid in children(chance.choice(started[-SAMPLERS:]).pid)[:1]:
                os.kill(pid, signal.SIGKILL)
                kills += 1
            due = time.monotonic() + chance.expovariate(1 / options.kill_every)
        time.sleep(0.1)
    ended = wait_processes(started, 30)
    assert {one.exit_code for one in ended} == {0}, [one.stderr[-2000:] for one in ended]
    assert cpu_before is not None, "no update of GRPO"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    updates = [line for line in lines if line["phase"] == "grpo"]
    summary = json.loads((folder / "worker-0/summary.json").read_text())
    return {
        "seconds": round(updates[-1]["time"] - updates[0]["time"], 2),
        "cpu_seconds": round(cpu_of_ended() - before - cpu_before, 1),
        "accuracy_before": summary["accuracy_before"],
        "accuracy": summary["accuracy_after"],
        "staleness": round(statistics.mean(line["staleness_mean"] for line in updates), 2),
        "kills": kills,
    }


def cpu_of_ended() -> float:
    """CPU seconds of the processes that have ended and were waited for, with their own ones."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_of_tree(pid: int) -> float:
    """CPU seconds so far of a process and of all that it has started."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        below = children(pid)
    except (FileNotFoundError, ProcessLookupError):  # it has ended, and counts as its parent's
        return 0.0
    own = sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_of_tree(child) for child in below)


def check_journal(run: dict[str, Any]) -> None:
    """Every rollout has each of its samples, none is too old, and there is no further rollout."""
    from trainer.rl.remote.journal import Journal, decode

    loop = run["loop"]
    per_rollout, depth, journal = loop["updates_per_rollout"], loop["async_depth"], Journal(run["dir"])
    rollouts = loop["steps"] // per_rollout
    for number in range(rollouts):
        content = journal.read(number)
        assert content is not None, f"rollout {number} is lost"
        samples = decode(content)
        assert len(samples) == loop["prompts_per_step"] * per_rollout * loop["group_size"], f"rollout {number}"
        versions = [int(version) for sample in samples for version in sample.versions]
        assert min(versions) >= per_rollout * (number - depth), f"rollout {number} is too old"
        assert max(versions) <= per_rollout * number, f"rollout {number} is from later weights"
    assert len(list((Path(run["dir"]) / "journal").glob("*.npz"))) == rollouts


def check_replay(run: dict[str, Any], folder: Path, options: argparse.Namespace) -> None:
    """Training on the journal again has the same weights and moments, bit for bit."""
    import numpy as np

    from tests.trainer.states import final_state

    trainers = WORKERS - SAMPLERS
    replay = run | {
        "dir": str(folder / "replayed"),
        "pod": run["pod"] | {"workers": trainers, "devices": trainers},
        "loop": run["loop"] | {"sampler": run["loop"]["sampler"] | {"workers": 0}, "replay": run["dir"]},
    }
    ended = wait_processes(start(replay, folder / "replay", options), RUN_SECONDS)
    assert {one.exit_code for one in ended} == {0}, [one.stderr[-2000:] for one in ended]
    (learnt, state), (again, replayed) = final_state(run), final_state(replay)
    assert learnt == again, f"{learnt} and {again} updates"
    for a, b in zip(state, replayed, strict=True):
        np.testing.assert_array_equal(a, b)


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians over the seeds, as Markdown, and the ratio of the wall seconds of the same seeds."""
    rows = ["| mode | seeds | seconds | CPU seconds | accuracy before | after | age | kills |", "| --- " * 8 + "|"]
    columns = ("seconds", "cpu_seconds", "accuracy_before", "accuracy", "staleness", "kills")
    for mode, runs in found.items():
        medians = [f"{statistics.median(run[column] for run in runs):.4g}" for column in columns]
        rows.append(f"| {mode} | {len(runs)} | {' | '.join(medians)} |")
    if len(found) == len(MODES):
        pairs = list(zip(*found.values(), strict=True))
        ratio = statistics.median(b["seconds"] / a["seconds"] for a, b in pairs)
        difference = statistics.median(b["accuracy"] - a["accuracy"] for a, b in pairs)
        rows.append(f"\nasynchronous to in turns, median over the seeds: {ratio:.2f} of the seconds, {difference:+.3f}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()

"""Time to accuracy of GRPO, beside TRL and Tunix: the same policy, prompts, reward, batch and rates, on the same cores.

    python -m tests.bench.peers.accuracy FOLDER [--trl PYTHON] [--tunix PYTHON] [--seeds 1] [--cores 0,1] [WORD ...]

`+experiment=arithmetic`, with these WORDs, is trained by us. Its policy after the warm start, exported to Hugging
Face's format, and the prompts of its rollouts are then given to the others. Each evaluates greedily on the held-out
prompts every so many updates and stops at LEVEL. Seconds are those from the first update on, with compilation and
without evaluations; ours are with evaluations, and compiled before. Programs that are done in FOLDER are not run again;
--loaded runs them on a machine that is not idle. Linux only: taskset.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from conf.schema.training.prompts import ArithmeticData
from tests.bench import grpo, learning, lm
from tests.bench.peers.grpo import usable
from trainer.data.arithmetic import ArithmeticProblems
from trainer.data.problem import Draw, Problem
from trainer.tokenizer import byte_level

PEERS = {"trl": "trl_accuracy.py", "tunix": "tunix_accuracy.py"}
LEVEL = learning.LEVEL
BOS = "<bos>"

Point = dict[str, float]
"""An evaluation: `update`, `seconds`, `accuracy`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--loaded", action="store_true")
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args()
    peers = {name: python for name in PEERS if (python := usable(name, getattr(options, name)))}
    for seed in range(options.seeds):
        folder = (options.folder / str(seed)).resolve()
        for name in ("slipway", *peers):
            if name == "slipway":
                points = ours(seed, folder, options)
            else:
                points = theirs(name, peers[name], task_of(seed, folder, options.words), folder, options)
            print(told(name, seed, points), flush=True)


def told(name: str, seed: int, points: list[Point]) -> str:
    """One program's line."""
    reached = [point for point in points if point["accuracy"] >= LEVEL]
    curve = " ".join(f"{point['accuracy']:.3f}" for point in points)
    if not reached:
        last = points[-1]
        return f"{name}, seed {seed}: {curve}; not {LEVEL} after {last['update']:.0f} updates, {last['seconds']:.0f} s"
    return (
        f"{name}, seed {seed}: {curve}; {LEVEL} after {reached[0]['update']:.0f} updates, {reached[0]['seconds']:.0f} s"
    )


def ours(seed: int, folder: Path, options: argparse.Namespace) -> list[Point]:
    """The experiment's evaluations."""
    trained = folder / "slipway"
    if not (trained / "done.json").exists() and not options.loaded:
        lm.wait_until_idle(options.cores)
    given = argparse.Namespace(cores=options.cores, words=options.words)
    learning.curve("grpo", seed, given, trained)
    lines = [json.loads(line) for line in (trained / "local/metrics.jsonl").read_text().splitlines()]
    warm = json.loads((trained / "local/summary.json").read_text())["warm_start_steps"]
    ready = [line for line in lines if line["phase"] == "warm_start" and "eval_accuracy" in line][-1]
    return [
        {
            "update": line["step"] - warm,
            "seconds": line["time"] - ready["time"],
            "accuracy": line["eval_accuracy"],
        }
        for line in [ready, *(line for line in lines if line["phase"] == "eval")]
    ]


def task_of(seed: int, folder: Path, words: list[str]) -> Path:
    """Write what the others need: the policy after our warm start, its prompts in order, and the settings."""
    task = folder / "task"
    if (task / "settings.json").exists():
        return task
    shutil.rmtree(task, ignore_errors=True)
    task.mkdir(parents=True)
    run = learning.run_file(["+experiment=arithmetic", f"run.seed={seed}", *words], folder / "warm")
    export_policy(run, folder / "warm", task / "policy")
    loop, optimizer = run["loop"], run["optimizer"]
    problems = ArithmeticProblems(ArithmeticData(**data_of(run)), seed)
    batches = [problems.train(Draw("rollout", step), loop["prompts_per_step"]) for step in range(loop["steps"])]
    write_rows(task / "train.jsonl", [problem for batch in batches for problem in batch])
    write_rows(task / "test.jsonl", problems.test(loop["eval_prompts"]))
    names = ("steps", "prompts_per_step", "group_size", "micro_batch_size", "max_prompt_length", "max_new_tokens",
             "temperature", "kl_coef", "eval_interval")  # fmt: skip
    given = {name: loop[name] for name in names} | {name: optimizer[name] for name in ("lr", "b2", "max_grad_norm")}
    given |= {name: optimizer["schedule"][name] for name in ("warmup_steps", "horizon_steps", "final_fraction")}
    given |= {"clip": loop["clip_ratio_low"], "level": LEVEL, "seed": seed}
    (task / "settings.json").write_text(json.dumps(given, indent=1) + "\n")
    return task


def data_of(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run["data"].items() if name in ArithmeticData.model_fields}


def export_policy(run: dict[str, Any], folder: Path, target: Path) -> None:
    """Train the warm start alone, and export what it leaves."""
    run = run | {"loop": run["loop"] | {"steps": 1}, "optimizer": run["optimizer"] | {"lr": 1e-30}}
    run["checkpoint"] = run["checkpoint"] | {"save_interval": 1}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    env = grpo.environment() | {"SLIPWAY_RUN_DIR": str(folder / "local")}
    quiet: Any = {"env": env, "cwd": folder, "check": True, "stdout": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-m", "trainer", str(folder / "run.yaml")], **quiet)
    saved = max(
        (path for path in (folder / "run/checkpoints").iterdir() if path.name.isdecimal()), key=lambda p: int(p.name)
    )
    subprocess.run([sys.executable, "-m", "trainer.convert", "export", str(saved), str(target)], **quiet)


def write_rows(file: Path, problems: list[Problem]) -> None:
    rows = [
        {
            "prompt": BOS + problem.question,
            "tokens": [byte_level.BOS_ID, *byte_level.encode(problem.question)],
            "answer": problem.answer,
        }
        for problem in problems
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def theirs(name: str, python: Path, task: Path, folder: Path, options: argparse.Namespace) -> list[Point]:
    """What another program says of its evaluations."""
    told = folder / f"{name}.jsonl"
    if not told.exists():
        if not options.loaded:
            lm.wait_until_idle(options.cores)
        script = Path(__file__).with_name(PEERS[name])
        command = ["taskset", "-c", options.cores, str(python), str(script), str(task)]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
        draft = told.with_suffix(".draft")
        with draft.open("w") as out, told.with_suffix(".log").open("w") as log:
            subprocess.run(command, env=env, cwd=folder, check=True, stdout=out, stderr=log)
        draft.rename(told)
    return [json.loads(line) for line in told.read_text().splitlines() if line.startswith('{"update"')]


if __name__ == "__main__":
    main()

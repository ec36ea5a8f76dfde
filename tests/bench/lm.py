"""Tokens per second of `lm_tinyshakespeare`, in turns with nanoGPT in torch, on the same cores.

    python -m tests.bench.lm input.txt [--torch PYTHON] [--rounds 5] [--steps 200] [--cores 0,1] [--full]

--torch: a Python that has torch; tests/bench/nanogpt.py runs in it. --full: also the whole 2,000 updates, for the
loss on the validation part. Linux only: both programs are bound to the cores by taskset.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.paths import ROOT

NANOGPT = Path(__file__).with_name("nanogpt.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--torch", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = [turn(options, Path(folder) / str(i)) for i in range(options.rounds)]
        print(f"load {os.getloadavg()[0]:.1f}; median of {options.rounds} rounds of {options.steps} updates:")
        for name in rounds[0]:
            print(f"{name:<28}{statistics.median(each[name] for each in rounds):12.4f}")
        if options.full:
            _, evals = ours(options.text, 2000, options.cores, Path(folder) / "full")
            print(f"loss on the validation part after 2,000 updates: {evals[-1]['eval_loss']:.4f}")
            if options.torch:
                found = theirs(options.torch, options.text, 2000, options.cores, "--evaluate")
                print(f"nanoGPT's: {found['eval_loss']:.4f}")


def turn(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One round: ours, then nanoGPT."""
    lines, _ = ours(options.text, options.steps, options.cores, folder)
    seconds = {name: sum(line[name] for line in lines[1:]) for name in ("step_time", "data_time", "transfer_time")}
    values = {
        "tokens/s": (len(lines) - 1) * 768 / seconds["step_time"],
        "wait for data, share": seconds["data_time"] / seconds["step_time"],
        "transfer, share": seconds["transfer_time"] / seconds["step_time"],
        "compile, s": lines[0]["compile_time"],
    }
    if options.torch:
        values["nanoGPT tokens/s"] = theirs(options.torch, options.text, options.steps, options.cores)[
            "tokens_per_second"
        ]
        values["ratio"] = values["tokens/s"] / values["nanoGPT tokens/s"]
    return values


def ours(text: Path, steps: int, cores: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of metrics of the trainer, as it runs on a worker; of its updates, a line for every 20, and of its
    evaluations."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file(text, steps, folder)))
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "SLIPWAY_RUN_DIR": str(folder / "local")}
    command = ["taskset", "-c", cores, sys.executable, "-m", "trainer", str(folder / "run.yaml")]
    subprocess.run(command, env=env, cwd=folder, check=True)
    lines = [json.loads(line) for line in (folder / "local/metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["phase"] == "train"]
    return trained, [line for line in lines if line["phase"] == "eval"]


def run_file(text: Path, steps: int, folder: Path) -> dict[str, Any]:
    """The experiment's run.yaml, on this machine's CPU."""
    from controller.config.compose import compose
    from controller.config.run_yaml import render

    words = ["+experiment=lm_tinyshakespeare", f"loop.steps={steps}", f"data.path={text.resolve()}"]
    words += ["loop.text_samples.interval=null", "logging.log_interval=20", "checkpoint.save_interval=100000"]
    words += [f"loop.eval_interval={steps}"]
    config, problems = compose(words)
    assert config is not None, problems
    raw = yaml.safe_load(render(config, "bench", "bucket", {"text": "text"}))
    return raw | {"dir": str(folder / "run")}


def theirs(python: Path, text: Path, steps: int, cores: str, *flags: str) -> dict[str, float]:
    """What nanoGPT says of itself."""
    command = ["taskset", "-c", cores, str(python), str(NANOGPT), str(text), "--steps", str(steps), *flags]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()

"""Updates of `lm_tinyshakespeare`, in turns with nanoGPT in torch, on the same cores: wall time and CPU time.

    python -m tests.bench.lm input.txt [--torch PYTHON] [--rounds 7] [--steps 200] [--cores 0,1] [--full] [--loaded]

--torch: a Python that has torch; tests/bench/nanogpt.py runs in it. --full: also the whole 2,000 updates, for the
loss on the validation part. Before each turn it waits until the cores are idle, and gives up if they are not within ten
minutes; --loaded measures regardless, and says so. Linux only: both programs are bound to the cores by taskset.

A ratio is the geometric mean over the rounds of one round's ratio, with a 95 % interval (Student's t on its logarithm).
CPU seconds are those of all threads during the timed updates.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scipy
import yaml

from tests.bench import grpo

NANOGPT = Path(__file__).with_name("nanogpt.py")
WARM_UPDATES = 20
"""Updates before the timed ones."""
IDLE_SHARE = 0.05
"""Of the cores' time, what others may use while the bench waits for its turn."""
PATIENCE_SECONDS = 600.0


class BusyError(Exception):
    """Other programs use the cores."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--torch", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--loaded", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = [turn(options, i, Path(folder) / str(i)) for i in range(options.rounds)]
        about = "on a LOADED machine: not a result" if options.loaded else "on idle cores"
        print(f"{options.rounds} rounds of {options.steps} updates, {about}; median, lowest and highest:")
        for line in table(rounds):
            print(line)
        if options.full:
            _, evals = ours(options.text, 2000, options.cores, Path(folder) / "full")
            print(f"loss on the validation part after 2,000 updates: {evals[-1]['eval_loss']:.4f}")
            if options.torch:
                found = theirs(options.torch, options.text, 2000, options.cores, "--evaluate")
                print(f"nanoGPT's: {found['eval_loss']:.4f}")


def table(rounds: Sequence[dict[str, float]]) -> list[str]:
    """Lines of all quantities, then of the two ratios with their intervals."""
    lines = []
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        lines.append(f"{name:<34}{statistics.median(values):12.4f}{min(values):12.4f}{max(values):12.4f}")
    for name in ("tokens/s", "CPU seconds per update"):
        if f"nanoGPT {name}" in rounds[0]:
            mean, low, high = ratio([each[name] for each in rounds], [each[f"nanoGPT {name}"] for each in rounds])
            lines.append(f"{name}, of nanoGPT's: {mean:.3f} (95 %: {low:.3f} to {high:.3f})")
    return lines


def ratio(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of the paired ratios a / b, and its 95 % interval; infinite from one pair."""
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    half = float(scipy.stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / len(logs) ** 0.5
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def turn(options: argparse.Namespace, number: int, folder: Path) -> dict[str, float]:
    """One round: ours and nanoGPT; who begins changes with each round."""
    values: dict[str, float] = {}

    def our_turn() -> None:
        values.update(our_values(options, folder))

    def their_turn() -> None:
        if options.torch:
            found = theirs(options.torch, options.text, options.steps, options.cores)
            values["nanoGPT tokens/s"] = found["tokens_per_second"]
            values["nanoGPT CPU seconds per update"] = found["cpu_seconds_per_update"]

    for take in (our_turn, their_turn) if number % 2 == 0 else (their_turn, our_turn):
        if not options.loaded:
            wait_until_idle(options.cores)
        take()
    return dict(sorted(values.items(), key=lambda item: item[0].startswith("nanoGPT")))


def our_values(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    lines, _ = ours(options.text, options.steps, options.cores, folder)
    timed = [line for line in lines if line["step"] > WARM_UPDATES]
    seconds = {name: sum(line[name] for line in timed) for name in ("step_time", "data_time", "transfer_time")}
    cpu = [line for line in json.loads((folder / "cpu.json").read_text()) if line["step"] >= WARM_UPDATES]
    return {
        "tokens/s": len(timed) * 768 / seconds["step_time"],
        "CPU seconds per update": (cpu[-1]["cpu"] - cpu[0]["cpu"]) / (cpu[-1]["step"] - cpu[0]["step"]),
        "wait for data, share": seconds["data_time"] / seconds["step_time"],
        "transfer, share": seconds["transfer_time"] / seconds["step_time"],
        "compile, s": lines[0]["compile_time"],
    }


def wait_until_idle(cores: str) -> None:
    """Return as soon as the cores were idle for two seconds. Raises BusyError after ten minutes."""
    given_up = time.monotonic() + PATIENCE_SECONDS
    while (share := busy_share(cores, 2.0)) > IDLE_SHARE:
        if time.monotonic() > given_up:
            raise BusyError(f"cores {cores} are {share:.0%} busy; end what runs there, or measure with --loaded")


def busy_share(cores: str, seconds: float) -> float:
    """Share of the cores' time that anything used during that many seconds."""
    before = core_times(Path("/proc/stat").read_text(), cores)
    time.sleep(seconds)
    after = core_times(Path("/proc/stat").read_text(), cores)
    return 1 - (after[0] - before[0]) / max(1, after[1] - before[1])


def core_times(stat: str, cores: str) -> tuple[int, int]:
    """Ticks of the cores that were idle or waited for a disk, and all of them, from the text of /proc/stat."""
    rows = {row[0]: [int(ticks) for ticks in row[1:9]] for row in map(str.split, stat.splitlines()) if row}
    chosen = [rows[f"cpu{core}"] for core in cores.split(",")]
    return sum(row[3] + row[4] for row in chosen), sum(map(sum, chosen))


def ours(text: Path, steps: int, cores: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of metrics of the trainer, as it runs on a worker; of its updates, a line for every 20, and of its
    evaluations. `folder`/cpu.json: CPU seconds of the process at each of these lines."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file(text, steps, folder)))
    env = grpo.environment() | {"SLIPWAY_RUN_DIR": str(folder / "local")}
    timed = f"from tests.bench import lm; lm.timed_trainer({str(folder / 'cpu.json')!r})"
    program = [sys.executable, "-c", timed, str(folder / "run.yaml")]
    subprocess.run(["taskset", "-c", cores, *program], env=env, cwd=folder, check=True)
    lines = [json.loads(line) for line in (folder / "local/metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["phase"] == "train"]
    return trained, [line for line in lines if line["phase"] == "eval"]


def timed_trainer(result: str, timed_phase: str = "train") -> None:
    """The trainer, which also writes its CPU seconds at each line of updates to the file `result`."""
    from trainer import main as trainer
    from trainer.telemetry.metrics import MetricsLogger

    log, lines = MetricsLogger.log, list[dict[str, Any]]()

    def log_and_note(self: MetricsLogger, step: int, phase: str, **values: Any) -> None:
        if phase == timed_phase:
            lines.append({"step": step, "cpu": time.process_time()})
            Path(result).write_text(json.dumps(lines))
        log(self, step, phase, **values)

    MetricsLogger.log = log_and_note
    trainer.main()


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

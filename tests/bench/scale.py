"""What commands need as their inputs grow: seconds, memory and the exponent of growth, for docs/performance.md.

    python -m tests.bench.scale [--part NAME ...] [--size N]

Each part is measured at a quarter, a half and the whole of its size, in processes of their own. The
exponent is that of the last doubling: 1 is linear, 2 quadratic; fixed costs lower it. Not run by pytest.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from controller.records import index

HERE = ("cloud=here", "cloud.backend=cpu", "program=command", "env.packages=none")


@dataclass
class Measured:
    """One size of one part."""

    seconds: float
    cpu: float
    megabytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--size", type=int, help="the whole size; default: that of docs/performance.md")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| what | size | seconds | processor seconds | peak MB | exponent (seconds, MB) |\n|---|---|---|---|---|---|")
    for name in options.part or PARTS:
        act, size, unit = PARTS[name]
        size, found = options.size or size, list[Measured]()
        for step in (size // 4, size // 2, size):
            with tempfile.TemporaryDirectory() as folder:
                found.append(act(step, Path(folder)))
            growth = "" if len(found) == 1 else f"{exponent(found, 'seconds')}, {exponent(found, 'megabytes')}"
            last = found[-1]
            print(
                f"| {name} | {step:,} {unit} | {last.seconds:.2f} | {last.cpu:.2f} | {last.megabytes:.0f} | {growth} |"
            )


def exponent(found: Sequence[Measured], what: str) -> str:
    before, after = (getattr(one, what) for one in found[-2:])
    return f"{math.log2(after / before):.2f}" if before > 0 and after > 0 else "–"


def command(words: Sequence[str], folder: Path, home: Path) -> Measured:
    """Run `slipway` with these words in a folder; its time and peak memory, children excluded."""
    argv, began = [sys.executable, "-P", "-m", "slipway", *words], time.monotonic()
    environment = {**os.environ, "SLIPWAY_HOME": str(home)}
    with tempfile.TemporaryFile() as errors:
        started = subprocess.Popen(argv, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(started.pid, 0)
        seconds = time.monotonic() - began
        started.returncode = status
        errors.seek(0)
        assert status == 0, errors.read().decode()[-3000:]
    return Measured(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000)


def sweep_plan(count: int, folder: Path) -> Measured:
    """`plan -m` of as many runs."""
    words = ["plan", "-m", "+experiment=quickstart", "cloud=here", "cloud.backend=cpu", f"run.seed=range(0,{count})"]
    return command(words, folder, folder / "home")


def records(count: int, folder: Path) -> Measured:
    """`runs --where --sort` over as many runs, each begun, then finished: two lines of the index."""
    for i in range(count):
        begun = {"run": f"quickstart-{i:08x}", "created": 1.7e9 + i, "project": "p", "bucket": "b", "sweep": ""}
        given = {"name": "quickstart", "seed": i, "overrides": ["+experiment=quickstart", f"run.seed={i}"]}
        pod = {"type": "v5litepod-16", "zone": "us-west4-a", "cloud": "local", "commit": "c" * 40, "code": "d" * 64}
        numbers = {"accuracy_before": 0.1, "accuracy_after": i / count, "reward_mean": 0.5, "steps": 100}
        ended = {"state": "finished", "seconds": 100.5, "attempts": 1, "usd": 0.5, "pods": [], "metrics": numbers}
        row = {**begun, **given, **pod}
        index.append_rows(folder / "home", [row | {"state": "running"}, row | ended])
    words = ["runs", "--where", "metrics.accuracy_after>0.5", "--sort", "metrics.accuracy_after"]
    return command(words, folder, folder / "home")


def code_bundle(count: int, folder: Path) -> Measured:
    """`plan` of a program in a repository of as many files of 4 kB, untracked by git."""
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    for i in range(count):
        (folder / f"package_{i // 100}").mkdir(exist_ok=True)
        (folder / f"package_{i // 100}" / f"module_{i}.py").write_bytes(os.urandom(2000).hex().encode())
    words = ["plan", *HERE, 'program.command=["true"]', "run.state_dir=/nonexistent", "code.max_mb=500"]
    words[-2] = f"run.state_dir={folder.parent / (folder.name + '-state')}"
    return command(words, folder, folder.parent / (folder.name + "-state"))


PARTS: dict[str, tuple[Callable[[int, Path], Measured], int, str]] = {
    "sweep plan": (sweep_plan, 1000, "runs"),
    "table of runs": (records, 10_000, "records"),
    "code bundle": (code_bundle, 5000, "files"),
}

if __name__ == "__main__":
    main()

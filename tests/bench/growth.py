"""How what a run or a sweep does grows with its length, by the exponent from each size to the next.

    python -m tests.bench growth [--part NAME ...]

1 is linear and 2 quadratic; fixed costs lower it. Bytes are counted; seconds are of the processor, in a process of
their own. It ends with code 1 if an exponent is above MOST. Not run by pytest, whose tests count bytes.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from controller.agent.transfers import GrowingObject
from controller.report.gather import gather_runs, local_reader
from tests.bench import scale
from tests.fakes.loopback import FakeBucket

MOST = 1.1
VALUES = {f"metric_{number}": number / 7 for number in range(15)}
Figure = float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            print(PARTS[options.one[0]][0](int(options.one[1]), Path(folder)))
        return
    print("| what | sizes | figures | exponent |\n|---|---|---|---|")
    worst = 0.0
    for name in options.part or PARTS:
        _, unit, what, sizes = PARTS[name]
        found = [measured(name, size) for size in sizes]
        power = exponent(sizes, found)
        worst = max(worst, power)
        shown = ", ".join(f"{figure:.3g}" if figure < 100 else f"{figure:,.0f}" for figure in found)
        print(
            f"| {name} | {', '.join(f'{size:,}' for size in sizes)} {unit} | {shown} {what} | {power:.2f} |",
            flush=True,
        )
    sys.exit(worst > MOST)


def exponent(sizes: Sequence[int], figures: Sequence[Figure]) -> float:
    """That of the last growth."""
    return math.log(figures[-1] / figures[-2]) / math.log(sizes[-1] / sizes[-2])


def measured(name: str, size: int) -> Figure:
    command = [sys.executable, "-m", "tests.bench.growth", "--one", name, str(size)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def lines(count: int) -> list[str]:
    times = ({"step": step, "phase": "train", "time": float(step), "step_time": 1.0} for step in range(1, count + 1))
    return [json.dumps(line | VALUES) + "\n" for line in times]


def metrics_upload(count: int, folder: Path) -> Figure:
    """Kilobytes that the trainer sends, an upload each 10 lines."""
    from trainer.checkpoint.storage import RunStorage
    from trainer.telemetry import uploads

    sent = 0
    store: Any = uploads._Folder

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(self: Any, *words: Any) -> Any:
            nonlocal sent
            sent += len(words[1])
            return real(self, *words)

        return act

    store.write, store.append = counted(store.write), counted(store.append)
    local = folder / "metrics.jsonl"
    uploader = uploads.Uploads(folder, RunStorage(str(folder / "run")))
    with local.open("w") as file:
        for number, line in enumerate(lines(count), 1):
            file.write(line)
            if number % 10 == 0:
                file.flush()
                uploader.start([local]).result()
    uploader.close()
    return sent / 1000


def log_upload(count: int, folder: Path) -> Figure:
    """Kilobytes that a worker sends of a log, an upload each 10 lines."""
    import os

    from controller.agent import supervisor

    class Rounds(Event):
        left = count // 10

        def wait(self, timeout: float | None = None) -> bool:
            with log.open("a") as file:
                file.writelines(lines(10))
            self.left -= 1
            return self.left < 0

    log = folder / "attempt-1" / "log"
    log.parent.mkdir()
    with FakeBucket.serving() as bucket:
        os.environ["SLIPWAY_STORAGE_ROOT"] = bucket.url
        supervisor._upload_log_periodically(log.parent, GrowingObject(log, "b", "runs/r/log"), Rounds())
        return bucket.sent / 1000


def run_with(count: int, folder: Path) -> None:
    (folder / "runs/r").mkdir(parents=True)
    (folder / "runs/r/metrics.jsonl").write_text("".join(lines(count)))


def report_memory(count: int, folder: Path) -> Figure:
    """Megabytes that a report allocates at most while it reads a run."""
    run_with(count, folder)
    tracemalloc.start()
    gather_runs([{"run": "r", "created": 0.0}], local_reader(folder))
    return tracemalloc.get_traced_memory()[1] / 1e6


def report_time(count: int, folder: Path) -> Figure:
    import time

    run_with(count, folder)
    began = time.process_time()
    gather_runs([{"run": "r", "created": 0.0}], local_reader(folder))
    return time.process_time() - began


def resume(count: int, folder: Path) -> Figure:
    import time

    from trainer.telemetry.metrics import MetricsLogger

    (folder / "local").mkdir()
    (folder / "local/metrics.jsonl").write_text("".join(lines(count)))
    log = MetricsLogger(folder / "local", str(folder / "run"), writes=True)
    began = time.process_time()
    log.resume(count)
    return time.process_time() - began


def runs(count: int, folder: Path) -> Figure:
    return scale.records(count, folder).cpu


def plan_many(count: int, folder: Path) -> Figure:
    return scale.sweep_plan(count, folder).cpu


PARTS: dict[str, tuple[Callable[[int, Path], Figure], str, str, tuple[int, ...]]] = {
    "metrics that the trainer sends": (metrics_upload, "lines", "kB", (100, 1000, 10_000)),
    "log that a worker sends": (log_upload, "lines", "kB", (100, 1000, 10_000)),
    "memory of a report": (report_memory, "lines", "MB", (1000, 10_000, 100_000)),
    "report of a run": (report_time, "lines", "s", (1000, 10_000, 100_000)),
    "resume": (resume, "lines", "s", (1000, 10_000, 100_000)),
    "`runs`": (runs, "runs", "s", (100, 1000, 10_000)),
    "`plan -m`": (plan_many, "runs", "s", (3, 30, 300, 1000)),
}

if __name__ == "__main__":
    main()

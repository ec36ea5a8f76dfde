"""Starts the trainer as real processes, each as on a worker of an emulated pod, and reads what they leave behind."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.loopback import free_port
from tests.paths import ROOT

CODE = "c0de" * 16


@dataclass(frozen=True)
class ProcessResult:
    """How a worker's process ended."""

    exit_code: int
    stderr: str


def start_trainer(
    run: dict[str, Any], folder: Path, cache: str, *environments: dict[str, str]
) -> list[subprocess.Popen[str]]:
    """The trainer, by `launch`; `folder` takes run.yaml and files."""
    folder.mkdir(parents=True, exist_ok=True)
    run_file = folder / "run.yaml"
    run_file.write_text(run if isinstance(run, str) else yaml.safe_dump(run))
    return start_processes(["trainer", str(run_file)], folder, cache, *environments)


def start_processes(
    module: list[str], folder: Path, cache: str, *environments: dict[str, str]
) -> list[subprocess.Popen[str]]:
    """`python -m` module and its arguments: a process for each environment, laid over what all workers have."""
    port, started = free_port(), []
    for worker, own in enumerate(environments):
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": os.environ["XLA_FLAGS"],
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "SLIPWAY_WORKER": str(worker),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
            "SLIPWAY_CODE_SHA256": CODE,
            "SLIPWAY_RUN_DIR": str(folder / f"worker-{worker}"),
        }
        command = [sys.executable, "-m", *module]
        started.append(subprocess.Popen(command, env=env | own, cwd=folder, stderr=subprocess.PIPE, text=True))
    return started


def wait_processes(started: list[subprocess.Popen[str]], seconds: float = 540) -> list[ProcessResult]:
    """Wait for all of them; whatever happens, none is left behind. seconds: after which one hangs."""
    ended = []
    try:
        for process in started:
            _, words = process.communicate(timeout=seconds)
            ended.append(ProcessResult(process.returncode, words))
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()  # else a later test is told of it
    return ended


def children(parent: int) -> list[int]:
    """Processes that this process has started, from any of its threads."""
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def results(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of metrics without what the clock says, such as which worker was slowest."""

    def is_timing(name: str) -> bool:
        return name.endswith(("time", "per_second")) or name.startswith("slow_worker")

    return [{name: value for name, value in line.items() if not is_timing(name)} for line in lines]

"""kill -9 of every process of a run, at random moments: it ends with the numbers of a run that nothing befell."""

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.groups import load_group
from tests.scenarios.experiments.test_quickstart import position, weights
from tests.trainer.processes import results, start_trainer, wait_processes

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
STEPS, EVERY = 20, 3


@pytest.fixture
def lm(lm_run, tmp_path) -> dict[str, Any]:
    """Documents, packed; five passes over them, so that a wrong position shows."""
    file = tmp_path / "documents.jsonl"
    words = [{"text": f"{i} and {i} make {2 * i}. " * (1 + i % 5)} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in words))
    return lm_run | {
        "data": load_group("data/jsonl") | {"path": str(file), "eval_fraction": 0.2},
        "model": lm_run["model"] | {"vocab_size": 260},
        "loop": lm_run["loop"] | {"steps": STEPS, "eval_interval": 7},
        "checkpoint": kept(lm_run),
    }


@pytest.fixture
def grpo(grpo_run) -> dict[str, Any]:
    loop = grpo_run["loop"] | {"steps": STEPS - 4, "warm_start_steps": 4}
    return grpo_run | {"loop": loop, "checkpoint": kept(grpo_run)}


@pytest.fixture
def puzzle(puzzle_run) -> dict[str, Any]:
    """Rows carry their states from one update to the next, and most have not halted when a life ends."""
    loop = puzzle_run["loop"] | {"steps": STEPS, "eval_interval": 7}
    return puzzle_run | {"loop": loop, "checkpoint": kept(puzzle_run)}


def kept(run: dict[str, Any]) -> dict[str, Any]:
    return run["checkpoint"] | {"save_interval": EVERY, "max_to_keep": 100}


def on(run: dict[str, Any], workers: int, folder: Path) -> dict[str, Any]:
    return run | {"pod": run["pod"] | {"workers": workers}, "dir": str(folder)}


def environments(workers: int) -> list[dict[str, str]]:
    return [{"JAX_NUM_CPU_DEVICES": str(8 // workers)} for _ in range(workers)]


def live(run: dict[str, Any], workers: int, folder: Path, cache: str, until: Any = None) -> None:
    """One life of the run in `folder`: to its end, or to the moment at which `until` says true."""
    processes = start_trainer(on(run, workers, folder / "bucket"), folder, cache, *environments(workers))
    if until is None:
        assert [(ended.exit_code, ended.stderr if ended.exit_code else "") for ended in wait_processes(processes)] == [
            (0, "")
        ] * workers
        return
    deadline = time.monotonic() + 1200
    try:
        while not until() and all(process.poll() is None for process in processes):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        for process in processes:
            process.kill()
        ended = wait_processes(processes)
    assert [one.exit_code for one in ended] == [-9] * workers


def moments(folder: Path, chance: random.Random) -> list[Any]:
    """While a checkpoint is written, just after one, and between two."""
    during, after, between = sorted(chance.sample(range(EVERY, STEPS - 2 * EVERY, EVERY), 3))
    checkpoints = folder / "bucket/checkpoints"
    line = f'{{"step": {between + 1}, "phase": '
    metrics = folder / "worker-0/metrics.jsonl"
    return [
        lambda: any(checkpoints.glob(f"{during}.orbax-checkpoint-tmp*")),
        lambda: (checkpoints / str(after)).exists(),
        lambda: metrics.exists() and line in metrics.read_text(),
    ]


def lines(folder: Path) -> list[dict[str, Any]]:
    return results([json.loads(line) for line in (folder / "bucket/metrics.jsonl").read_text().splitlines()])


def assert_step_is_equal(cut: Path, whole: Path, step: int, atol: float = 0.0) -> None:
    assert position(cut / "bucket", step) == position(whole / "bucket", step)
    found, expected = weights(cut / "bucket", step), weights(whole / "bucket", step)
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("name", "workers", "seed"),
    [("grpo", 1, 3), *(pytest.param(*each, marks=pytest.mark.wide) for each in (("puzzle", 2, 4), ("lm", 4, 2)))],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(request, tmp_path, compile_cache, name, workers, seed):
    run, whole, cut = request.getfixturevalue(name), tmp_path / "whole", tmp_path / "cut"
    live(run, workers, whole, compile_cache)
    for life, moment in enumerate(moments(cut, random.Random(seed))):
        live(run, workers, cut, compile_cache, until=moment)
        if life == 1:
            shutil.copytree(cut, tmp_path / "fewer")
    live(run, workers, cut, compile_cache)
    for step in [*range(EVERY, STEPS, EVERY), STEPS]:
        assert_step_is_equal(cut, whole, step)
    assert lines(cut) == lines(whole)
    if workers > 1:
        live(run, workers // 2, tmp_path / "fewer", compile_cache)
        # the carried states of puzzles have gone through dozens of calls of the net
        assert_step_is_equal(tmp_path / "fewer", whole, STEPS, atol=1e-4 if name == "puzzle" else 1e-5)

"""Puzzles on the emulated pod: a preempted run of a tiny recursive model ends with the bits of an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scenarios.experiments.test_quickstart import folder_of, homes, run, weights
from tests.trainer.processes import results

__all__ = ["homes"]
SHORT = [
    "+experiment=trm_sudoku_4x4",
    "tpu.accelerator_type=v4-16",  # 2 workers
    "tpu.zone=us-central2-b",
    "cloud.operation_seconds=0",
    "model.dim=16",
    "model.h_cycles=1",
    "loop.puzzles=40",
    "loop.batch_size=16",
    "loop.steps=8",
    "loop.eval_interval=4",
    "loop.eval_puzzles=32",
    "checkpoint.save_interval=3",
    "logging.log_interval=1",
]


def metric_lines(folder: Path) -> list[dict[str, Any]]:
    return results([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


@pytest.mark.deep
@pytest.mark.e2e
def test_a_preempted_run_has_the_same_metrics_and_state(homes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line of metrics, and weights, moments, average and the rows' carried states of the last checkpoint."""
    quiet = homes("quiet")
    run(capsys, short=SHORT)
    undisturbed = folder_of(quiet)
    disturbed_home = homes("disturbed")
    out = run(capsys, "cloud.faults=[{kind: preempted, after_object: checkpoints/3/commit_success}]", short=SHORT)
    assert "preempted: " in out
    disturbed = folder_of(disturbed_home)
    left, right = weights(undisturbed), weights(disturbed)
    assert any("carry" in name and "latents" in name for name in left)
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)
    assert metric_lines(disturbed) == metric_lines(undisturbed)

"""The small puzzle experiments; on the emulated pod a preempted run ends with the bits of an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conf.schema.training.trm import Trm
from controller.config.compose import compose
from tests.scenarios.experiments.test_quickstart import assert_same, folder_of, homes, run, weights
from tests.trainer.processes import results
from trainer.puzzles.__main__ import main as build_puzzles
from trainer.puzzles.dataset import PuzzleDataset

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


@pytest.mark.parametrize("experiment", ["trm_sudoku_4x4", "trm_sudoku_9x9_easy"])
def test_the_generated_puzzles_have_the_sizes_of_the_model(experiment: str, tmp_path: Path) -> None:
    config, problems = compose([f"+experiment={experiment}", "loop.puzzles=6", "loop.steps=1"])
    assert config is not None, problems
    assert isinstance(config.model, Trm)
    slipway, module, *words = config.assets.datasets["sudoku"].build or ()
    assert (slipway, module) == ("slipway", "trainer.puzzles")
    small = {"{output}": str(tmp_path / "data"), "512": "4"}
    assert build_puzzles([small.get(word, word) for word in words]) == 0
    data = PuzzleDataset.open(str(tmp_path / "data"))
    assert (data.cells, data.vocabulary) == (config.model.seq_len, config.model.vocab_size)
    assert (data.splits["train"]["groups"], data.splits["test"]["groups"]) == (6, 4)


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
    assert any("carry" in name and "latents" in name for name in weights(undisturbed))
    assert_same(undisturbed, disturbed)
    assert metric_lines(disturbed) == metric_lines(undisturbed)

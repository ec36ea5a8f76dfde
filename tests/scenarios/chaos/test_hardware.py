"""Faults of hardware under real training on two workers, with a preemption in between: the weights are the same."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.scenarios.chaos.conftest import ChaosHarnessFactory
from tests.scenarios.chaos.fault_schedule import Spec
from tests.scenarios.chaos.harness import ChaosResult
from tests.scenarios.chaos.test_training import TRAINING, parameters

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
SETTINGS = (
    *TRAINING, "loop.steps=16", "loop.eval_interval=16", "loop.text_samples.interval=16", "checkpoint.save_interval=4",
    "checkpoint.verify_interval=3", "loop.evaluations={planted: {run: 'hardware:nothing', interval: end}}",
)  # fmt: skip
FAULTS = [
    {"attempt": 1, "step": 5, "worker": 1, "what": "weight"},
    # so that the preemption comes before the next checkpoint
    *({"attempt": 2, "step": 8, "worker": worker, "what": "slow"} for worker in (0, 1)),
    # not right after the restored step, where the devices of a worker may share what was read
    {"attempt": 3, "step": 9, "worker": 0, "what": "nan"},
    {"attempt": 4, "step": 9, "worker": 0, "what": "moment"},
    {"attempt": 5, "step": 9, "worker": 1, "what": "data"},
    {"attempt": 6, "step": 12, "worker": 1, "what": "slow"},
]
PREEMPTION = {"kind": "preempted", "after_object": "checkpoints/8/commit_success"}
VERDICTS = [
    ("corruption", "restart_program", 1, "worker 1: its copy of params."),
    ("preempted", "replace_node", None, ""),
    ("corruption", "restart_program", 0, "worker 0: its copy of params."),
    ("corruption", "replace_node", 0, "worker 0: its copy of "),  # the second time on this pod
    ("corruption", "restart_program", None, "worker 0 or 1: its data differ in updates 10 to 12"),
]


def trained(make_harness: ChaosHarnessFactory, faults: list[Spec], *script: Spec) -> ChaosResult:
    words = json.dumps(json.dumps(faults))
    with make_harness(*SETTINGS, f"env.vars={{FAULTS: {words}}}", keep=()) as stand:
        modules = stand.folder / "repository" / "slipway"
        modules.mkdir()
        shutil.copy(Path(__file__).with_name("hardware.py"), modules)
        return stand.run(script)


def test_flipped_bits_a_nan_and_a_slow_worker(make_harness: ChaosHarnessFactory, tmp_path: Path) -> None:
    undisturbed, ended = trained(make_harness, []), trained(make_harness, FAULTS, PREEMPTION)
    verdicts = [json.loads(ended.results[name]) for name in sorted(ended.results) if "/verdicts/" in name]
    assert len(verdicts) == len(VERDICTS), ended.output
    for found, (kind, response, worker, words) in zip(verdicts, VERDICTS, strict=True):
        assert (found["kind"], found["response"], found["worker"]) == (kind, response, worker), ended.output
        assert words in found["message"], ended.output
    one, other = parameters(undisturbed, tmp_path / "one"), parameters(ended, tmp_path / "other")
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one), ended.output
    metrics = next(content for name, content in ended.results.items() if name.endswith("/metrics.jsonl"))
    lines = [json.loads(line) for line in metrics.decode().splitlines()]
    # the last two updates are logged together, so the last line says little about the workers
    slow = [line for line in lines if line["phase"] == "train" and 12 < line["step"] < 16]
    assert [line["slow_worker"] for line in slow] == [1, 1, 1]
    assert all(line["slow_worker_share"] > 0.5 for line in slow), slow

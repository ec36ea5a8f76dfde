"""Schedules of misfortune against real training on two processes: the weights are the same, to the last bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import seeds, wide
from tests.scenarios.chaos.conftest import ChaosHarnessFactory
from tests.scenarios.chaos.fault_schedule import ChaosScenario, Spec, fault_schedule
from tests.scenarios.chaos.harness import ChaosResult
from tests.scenarios.experiments.test_quickstart import weights

pytestmark = pytest.mark.e2e
TRAINING = (
    "+experiment=lm_tinyshakespeare", "scale=tiny", "env.packages=image", "tpu.accelerator_type=v4-16",
    "tpu.zone=us-central2-b", "loop.steps=6", "loop.eval_interval=6", "loop.text_samples.interval=6",
    "logging.log_interval=1", "recovery.max_program_failures=8", "recovery.max_without_progress=8",
)  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", seeds(metafunc.config.getoption("--chaos-training"), deep=1, nightly=1))


def of_training(seed: int) -> tuple[Spec, ...]:
    objects = [f"checkpoints/{step}/commit_success" for step in (2, 4, 6)]
    return fault_schedule(seed, ChaosScenario(2, objects, seconds=8.0, max_blip_seconds=4.0))


OUTAGE = {"kind": "bucket_outage", "after_object": "checkpoints/2/commit_success", "seconds": 15}


def parameters(ended: ChaosResult, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Of the last checkpoint that the run left."""
    for name, content in ended.results.items():
        inside = name.partition("/")[2].partition("/")[2]  # behind runs/ID/
        if name.startswith("runs/") and inside.startswith("checkpoints/"):
            (folder / inside).parent.mkdir(parents=True, exist_ok=True)
            (folder / inside).write_bytes(content)
    return weights(folder)


def test_training_ends_with_the_same_weights(seed: int, make_harness: ChaosHarnessFactory, tmp_path: Path) -> None:
    with make_harness(*TRAINING, keep=()) as stand:
        undisturbed, ended = stand.run_undisturbed, stand.run(of_training(seed))
        assert ended.state == undisturbed.state, ended.output
        one, other = parameters(undisturbed, tmp_path / "one"), parameters(ended, tmp_path / "other")
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one), ended.output
        metrics = next(content for name, content in ended.results.items() if name.endswith("/metrics.jsonl"))
        steps = [row["step"] for row in map(json.loads, metrics.decode().splitlines()) if "loss" in row]
        assert steps == sorted(set(steps)), ended.output


@pytest.mark.deep
@pytest.mark.parametrize(
    "strike",
    [
        *wide({"kind": "killed", "worker": 1, "after_object": "checkpoints/2/commit_success", "delay_seconds": 7}),
        {"kind": "preempted", "after_object": "checkpoints/2/commit_success", "delay_seconds": 7},
    ],
    ids=lambda spec: spec["kind"],
)
def test_an_outage_of_the_bucket_changes_nothing(
    strike: Spec, make_harness: ChaosHarnessFactory, tmp_path: Path
) -> None:
    """The bucket is out from the first checkpoint on, and in between a program or the pod is lost."""
    with make_harness(*TRAINING, keep=()) as stand:
        undisturbed, ended = stand.run_undisturbed, stand.run((OUTAGE, strike))
        assert ended.exit_codes == [0], ended.output
        assert all(fault["struck"] for fault in ended.faults), ended.output
        one, other = parameters(undisturbed, tmp_path / "one"), parameters(ended, tmp_path / "other")
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one), ended.output

"""Real JAX on two workers: a preemption that is announced, and a worker that dies, change nothing of what is learnt."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.planes import Plane
from tests.scenarios.experiments.test_quickstart import assert_same, folder_of, homes

__all__ = ["homes"]
pytestmark = [pytest.mark.e2e, pytest.mark.deep]
STEPS = 40
SHORT = [
    "+experiment=lm_tinyshakespeare",
    "scale=tiny",
    "data.tokenizer=bytes",
    f"loop.steps={STEPS}",
    "loop.total_batch_tokens=16384",
    "loop.eval_interval=1000",
    "loop.text_samples.interval=null",
    "checkpoint.save_interval=5",
    "logging.log_interval=1",
]


def up(*words: str) -> tuple[list[str], list[int], dict[int, float]]:
    """What was said, the steps as they were computed, and the loss of each as it was computed last."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "controller", "up", "--json", *SHORT, *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    lines = [event["metrics"] for event in events if event["kind"] == "metrics"]
    # a new VM tells all lines anew: those that it has from the bucket are known by their time
    train = list({(line["step"], line["time"]): line for line in lines if line["phase"] == "train"}.values())
    notes = [event["message"] for event in events if event["kind"] == "note"]
    return notes, [line["step"] for line in train], {line["step"]: line["loss"] for line in train}


BUCKET = "cloud.bucket=slipway-local-slipway-us-central2"  # which `folder_of` reads


@pytest.mark.wide
def test_with_notice_nothing_is_computed_twice_and_without_it_one_dead_worker_restarts_all(
    homes: Any, plane: Plane
) -> None:
    pod = (*plane.two, BUCKET)
    quiet = homes("quiet")
    _, steps, losses = up(*pod)
    assert steps == list(range(1, STEPS + 1))
    undisturbed = folder_of(quiet)
    cut = homes("cut")
    fault = "{kind: preempted, after_object: checkpoints/5/commit_success, notice_seconds: 120}"
    notes, steps, again = up(*pod, f"cloud.faults=[{fault}]")
    assert len(steps) - len(set(steps)) <= 1
    assert again == losses
    assert [note for note in notes if "a preemption notice; its program saved its state and exited; replacing" in note]
    assert_same(undisturbed, folder_of(cut))
    torn = homes("torn")
    dead = "{kind: killed, worker: 1, after_object: checkpoints/5/commit_success}"
    notes, steps, again = up(*pod, f"cloud.faults=[{dead}]")
    assert again == losses
    assert "worker lost: worker 1: its program was terminated by SIGKILL from outside; " in " ".join(notes)
    assert_same(undisturbed, folder_of(torn))

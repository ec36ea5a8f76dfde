"""A run on two processes whose bucket does not answer from its second checkpoint on, until it does again."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controller.localcloud.conftest import cloud as cloud
from tests.controller.localcloud.harness import wait_for
from tests.scenarios.experiments.test_quickstart import assert_same
from tests.scenarios.training.test_bucket import FOLDER, Bucket
from tests.trainer.processes import start_processes, wait_processes
from trainer.checkpoint.manager import LOCAL_FOLDER

STEPS = 10
pytestmark = [pytest.mark.deep, pytest.mark.e2e]


@pytest.fixture
def run(lm_run: dict[str, Any]) -> dict[str, Any]:
    return lm_run | {"pod": lm_run["pod"] | {"workers": 2}, "loop": lm_run["loop"] | {"steps": STEPS}}


def start(run: dict[str, Any], bucket: Bucket, folder: Path, outage: str = "") -> list[subprocess.Popen[str]]:
    """Start both workers; `outage` says when the bucket stops answering, see outage_trainer.py."""
    root = bucket.variables["STORAGE_EMULATOR_HOST"]
    own = bucket.variables | {"JAX_NUM_CPU_DEVICES": "4", "EMULATED_CLOUD": root, "OUTAGE": outage}
    run_file = folder / "run.yaml"
    folder.mkdir(exist_ok=True)
    run_file.write_text(yaml.safe_dump(run))
    module = "tests.scenarios.training.outage_trainer" if outage else "trainer"
    return start_processes([module, str(run_file)], folder, "", own, own)


def back(bucket: Bucket) -> None:
    bucket.cloud.call_ok("DELETE", "emulator/faults")


def refused(bucket: Bucket) -> int:
    """How many requests the outage has met."""
    faults = bucket.cloud.call_ok("GET", "emulator/state")["fault"]
    return sum(len(fault["struck"]) for fault in faults.values())


def saved(folder: Path, step: int) -> bool:
    """Whether both workers have a step on their disks."""
    return all((folder / f"worker-{worker}" / LOCAL_FOLDER / str(step)).exists() for worker in (0, 1))


def losses(bucket: Bucket) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in bucket.read(f"{FOLDER}/metrics.jsonl").decode().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["phase"] == "train"]


def test_kill_9_and_a_restart_during_an_outage(cloud, run, tmp_path):
    run = run | {"dir": f"gs://whole/{FOLDER}"}
    whole, bucket = Bucket(cloud, "whole"), Bucket(cloud, "bucket")
    assert [ended.exit_code for ended in wait_processes(start(run, whole, tmp_path / "whole"))] == [0, 0]

    run = run | {"dir": f"gs://bucket/{FOLDER}"}
    folder = tmp_path / "disturbed"
    processes = start(run, bucket, folder, "save 4")
    wait_for(lambda: saved(folder, STEPS), "the last checkpoint is on the disks", 300)
    assert [process.poll() for process in processes] == [None, None], "training goes on, and waits at its end"
    for process in processes:
        process.kill()
    wait_processes(processes)
    processes = start(run, bucket, folder)  # on the same pod; it waits
    back(bucket)
    ended = wait_processes(processes)
    assert [one.exit_code for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert "the bucket answers again: uploaded the checkpoints of steps" in ended[0].stderr
    assert not list(folder.glob(f"worker-*/{LOCAL_FOLDER}/*"))
    assert bucket.steps()[-2:] == whole.steps() == [8, 10]
    assert_same(whole.copy_last(STEPS, tmp_path / "one"), bucket.copy_last(STEPS, tmp_path / "other"))
    assert losses(bucket) == losses(whole)


def test_an_outage_that_begins_amid_a_save_is_waited_for(cloud, run, tmp_path):
    """Worker 0 tries to read again and again while the other one waits for it in the same save."""
    run = run | {"dir": f"gs://amid/{FOLDER}"}
    bucket, folder = Bucket(cloud, "amid"), tmp_path / "run"
    processes = start(run, bucket, folder, "_write 4")
    wait_for(lambda: refused(bucket) >= 6, "worker 0 has tried again", 300)
    assert [process.poll() for process in processes] == [None, None]
    back(bucket)
    ended = wait_processes(processes)
    assert [one.exit_code for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert not list(folder.glob(f"worker-*/{LOCAL_FOLDER}/*"))
    assert bucket.steps()[-2:] == [8, 10]
    assert [step for step, _ in losses(bucket)] == list(range(1, STEPS + 1))


def test_past_the_bound_all_workers_end_with_the_key(cloud, run, tmp_path):
    run = run | {"dir": f"gs://bound/{FOLDER}"}
    run["checkpoint"] = run["checkpoint"] | {"max_outage_hours": 0.001}
    bucket, folder = Bucket(cloud, "bound"), tmp_path / "run"
    processes = start(run, bucket, folder, "save 4")
    ended = wait_processes(processes)
    assert [one.exit_code for one in ended] == [1, 1]
    for one in ended:
        assert "checkpoint.max_outage_hours: gs://bound/runs/lm has not answered for 0.001 h, the limit" in one.stderr
        assert "Traceback" not in one.stderr
    back(bucket)
    ended = wait_processes(start(run, bucket, folder))
    assert [one.exit_code for one in ended] == [0, 0]
    assert bucket.steps()[-2:] == [8, 10]

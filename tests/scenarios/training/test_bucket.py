"""Runs whose folder is in a bucket, through refusals, a cut write, lost objects, replaced VMs and outages."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import yaml

from conf.schema.training.run_yaml import RunFile
from tests.controller.localcloud.conftest import cloud as cloud
from tests.controller.localcloud.harness import EmulatedCloud, wait_for
from tests.scenarios.experiments.test_quickstart import assert_same, position, weights
from tests.trainer.processes import ROOT, start_processes, start_trainer, wait_processes
from trainer import main
from trainer.checkpoint.manager import LOCAL_FOLDER

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
FOLDER, STEPS, SHORT = "runs/lm", 14, 10
READ_EVENTS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
events.Reload()
curve = {point.step: point.value for point in events.Scalars("train/loss")}
texts = {point.step: point.tensor_proto.string_val[0].decode() for point in events.Tensors("samples")}
print(json.dumps([curve, texts]))
"""


class Bucket:
    """A bucket of the emulated cloud, and how programs find it."""

    def __init__(self, cloud: EmulatedCloud, name: str) -> None:
        self.cloud, self.name = cloud, name
        cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": name})

    @property
    def variables(self) -> dict[str, str]:
        root = f"{self.cloud.endpoint['url']}t/{self.cloud.endpoint['token']}"
        settings = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}
        return {"STORAGE_EMULATOR_HOST": root, "TENSORSTORE_GCS_HTTP_URL": root} | settings

    def sizes(self, prefix: str) -> dict[str, int]:
        """Objects whose names begin so, without what they begin with."""
        path = f"storage/v1/b/{self.name}/o?maxResults=1000&prefix={quote(prefix, safe='')}"
        found = self.cloud.call_ok("GET", path).get("items", [])
        return {item["name"].removeprefix(prefix): int(item["size"]) for item in found}

    def read(self, name: str) -> bytes:
        status, data, _ = self.cloud.send("GET", f"storage/v1/b/{self.name}/o/{quote(name, safe='')}?alt=media")
        assert status == 200
        return data

    def delete(self, name: str) -> None:
        self.cloud.call_ok("DELETE", f"storage/v1/b/{self.name}/o/{quote(name, safe='')}")

    def refuse(self, key: str, times: int) -> None:
        """So many of the next uploads and downloads are answered with 503."""
        match = f"(POST|PUT) .*upload/.*/b/{self.name}/|GET .*/b/{self.name}/o/"
        storm = {"kind": "http", "status": 503, "match": match, "times": times}
        self.cloud.call_ok("POST", "emulator/faults", {"key": key, "faults": [storm]})

    def copy_last(self, steps: int, folder: Path) -> Path:
        """The checkpoint of the last step, as files."""
        prefix = f"{FOLDER}/checkpoints/{steps}/"
        for name in self.sizes(prefix):
            file = folder / "checkpoints" / str(steps) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.read(prefix + name))
        return folder

    def steps(self) -> list[int]:
        """Complete checkpoints."""
        names = [name.split("/") for name in self.sizes(f"{FOLDER}/checkpoints/")]
        return sorted(int(name[0]) for name in names if name[1:] == ["commit_success.txt"])


@pytest.fixture(autouse=True)
def no_faults_remain(cloud: EmulatedCloud) -> Iterator[None]:
    yield
    cloud.call_ok("DELETE", "emulator/faults")


@pytest.fixture
def run(lm_run) -> dict[str, Any]:
    samples = {"interval": 4, "prompts": ["1 and "], "max_new_tokens": 5, "temperature": 0.8}
    return lm_run | {
        "dir": f"gs://bucket/{FOLDER}",
        "compile_cache": True,
        "pod": lm_run["pod"] | {"workers": 4},
        "loop": lm_run["loop"] | {"steps": STEPS, "text_samples": samples},
        "checkpoint": lm_run["checkpoint"] | {"best": {"metric": "eval_loss", "mode": "max"}},
    }


def wait_for_write(bucket: Bucket, processes: list[subprocess.Popen[str]], step: int, part: str) -> None:
    """Until an object of that checkpoint is there whose name holds `part`."""
    prefix = f"{FOLDER}/checkpoints/{step}/"
    try:
        wait_for(lambda: any(part in name for name in bucket.sizes(prefix)), "a write has begun", 300)
    except BaseException:
        for process in processes:
            process.kill()
        wait_processes(processes)
        raise


def cut_while_writing(bucket: Bucket, processes: list[subprocess.Popen[str]], step: int) -> None:
    """kill -9 of all, while objects of that checkpoint are there and others are not."""
    wait_for_write(bucket, processes, step, "ocdbt.process")
    for process in processes:
        process.kill()
    assert [ended.exit_code for ended in wait_processes(processes)] == [-9] * 4


@pytest.mark.wide
def test_a_run_in_a_bucket_through_storm_cut_and_loss(cloud, run, tmp_path):
    bucket = Bucket(cloud, "bucket")
    workers = [bucket.variables] * 4

    bucket.refuse("at the start", 4)
    short = run | {"loop": run["loop"] | {"steps": 4}}
    processes = start_trainer(short, tmp_path / "first", "", *workers)
    wait_for_write(bucket, processes, 2, "")
    bucket.refuse("amid a checkpoint", 8)
    assert [ended.exit_code for ended in wait_processes(processes)] == [0] * 4
    assert bucket.steps() == [2, 4]
    programs = bucket.sizes(f"{FOLDER}/compile_cache/")
    assert sum("jit_update" in name for name in programs) == 1

    # the VMs are replaced: nothing but the bucket is left; then the next checkpoint but one is cut
    processes = start_trainer(run, tmp_path / "second", "", *workers)
    cut_while_writing(bucket, processes, 8)
    names = [path.name for path in (tmp_path / "second/worker-0/compile_cache").rglob("jit_update*")]
    assert [f"/{name}" in whole for whole in programs for name in names if "jit_update" in whole] == [True]
    newest = bucket.steps()[-1]
    assert newest in (6, 8)
    sizes = bucket.sizes(f"{FOLDER}/checkpoints/{newest}/")
    lost = max((name for name in sizes if "/d/" in name), key=sizes.__getitem__)
    bucket.delete(f"{FOLDER}/checkpoints/{newest}/{lost}")

    # half as many processes, another mesh
    other = run | {"pod": run["pod"] | {"workers": 2}, "mesh": {"data": 2, "fsdp": 2, "tensor": 2}}
    first, second = wait_processes(
        start_trainer(other, tmp_path / "third", "", *[bucket.variables | {"JAX_NUM_CPU_DEVICES": "4"}] * 2)
    )
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    warned = [line for line in (first.stderr + second.stderr).splitlines() if " root WARNING " in line]
    words = f"checkpoint of step {newest} is broken, skipping it: worker 0: ValueError: {lost} is missing"
    assert [line.partition(" root WARNING ")[2] for line in warned] == [words]
    assert bucket.steps() == [4, 12, 14]  # the best by its evaluation, and the last two
    assert {"best": 4, "metric": "eval_loss"}.items() <= json.loads(bucket.read(f"{FOLDER}/scores.json")).items()

    alone = run | {"dir": str(tmp_path / "alone"), "pod": run["pod"] | {"workers": 1}, "compile_cache": False}
    main.train(RunFile.model_validate(alone), tmp_path / "local")
    # the last checkpoint is that of the undisturbed run, but for rounding
    ours, theirs = weights(bucket.copy_last(STEPS, tmp_path / "copy")), weights(tmp_path / "alone")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-5, err_msg=name)
    assert position(tmp_path / "copy", STEPS) == position(tmp_path / "alone", STEPS)
    curve, texts = events(bucket)
    expected = [json.loads(line) for line in (tmp_path / "local/metrics.jsonl").read_text().splitlines()]
    told = [json.loads(line) for line in bucket.read(f"{FOLDER}/metrics.jsonl").decode().splitlines()]
    assert [(line["step"], line["phase"]) for line in told] == [(line["step"], line["phase"]) for line in expected]
    losses = {str(line["step"]): line["loss"] for line in expected if line["phase"] == "train"}
    assert len(losses) == STEPS
    assert curve == pytest.approx(losses, rel=1e-4)
    assert sorted(texts) == ["12", "4", "8"]
    assert all("1 and " in text for text in texts.values())


def events(bucket: Bucket) -> list[dict[str, Any]]:
    """Points of the loss and texts, by step, as TensorBoard reads them from the bucket."""
    command = [sys.executable, "-c", READ_EVENTS, f"gs://{bucket.name}/{FOLDER}/tb"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | bucket.variables
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


@pytest.fixture
def short(lm_run: dict[str, Any]) -> dict[str, Any]:
    return lm_run | {"pod": lm_run["pod"] | {"workers": 2}, "loop": lm_run["loop"] | {"steps": SHORT}}


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


@pytest.mark.wide
def test_kill_9_and_a_restart_during_an_outage(cloud, short, tmp_path):
    run = short | {"dir": f"gs://whole/{FOLDER}"}
    whole, bucket = Bucket(cloud, "whole"), Bucket(cloud, "killed")
    assert [ended.exit_code for ended in wait_processes(start(run, whole, tmp_path / "whole"))] == [0, 0]

    run = short | {"dir": f"gs://killed/{FOLDER}"}
    folder = tmp_path / "disturbed"
    processes = start(run, bucket, folder, "save 4")
    wait_for(lambda: saved(folder, SHORT), "the last checkpoint is on the disks", 300)
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
    assert_same(whole.copy_last(SHORT, tmp_path / "one"), bucket.copy_last(SHORT, tmp_path / "other"))
    assert losses(bucket) == losses(whole)


def test_an_outage_that_begins_amid_a_save_is_waited_for(cloud, short, tmp_path):
    """Worker 0 tries to read again and again while the other one waits for it in the same save."""
    run = short | {"dir": f"gs://amid/{FOLDER}"}
    bucket, folder = Bucket(cloud, "amid"), tmp_path / "run"
    processes = start(run, bucket, folder, "_write 4")
    wait_for(lambda: refused(bucket) >= 6, "worker 0 has tried again", 300)
    assert [process.poll() for process in processes] == [None, None]
    back(bucket)
    ended = wait_processes(processes)
    assert [one.exit_code for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert not list(folder.glob(f"worker-*/{LOCAL_FOLDER}/*"))
    assert bucket.steps()[-2:] == [8, 10]
    assert [step for step, _ in losses(bucket)] == list(range(1, SHORT + 1))


@pytest.mark.wide
def test_past_the_bound_all_workers_end_with_the_key(cloud, short, tmp_path):
    run = short | {"dir": f"gs://bound/{FOLDER}"}
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

"""Start-up checks in one process; test_main.py starts real ones."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from conf.schema.training.run_yaml import PodFacts, RunFile
from trainer.distributed import agreement, fingerprint, runtime
from trainer.distributed.checksums import DisagreementError


def pod(**facts) -> PodFacts:
    known = {"accelerator_type": "v5litepod-8", "workers": 1, "devices": 8, "backend": "cpu"}
    return PodFacts(**known | {"hbm_bytes_per_chip": None, "bf16_flops_per_chip": None} | facts)


@pytest.mark.parametrize("facts", [{"devices": 4}, {"backend": "tpu"}, {"workers": 2, "devices": 16}])
def test_wrong_devices_are_shown_by_worker(facts):
    with pytest.raises(agreement.WrongDevicesError) as error:
        agreement.check_devices(pod(**facts))
    title, head, first, *_ = str(error.value).splitlines()
    assert title.startswith("v5litepod-8 has ")
    assert head.split() == ["worker", "backend", "kind", "devices"]
    assert first.split() == ["0", "cpu", "cpu", "8"]
    if facts.get("workers") == 2:
        assert str(error.value).splitlines()[-1].split() == ["1", "cpu", "cpu", "0"]


def test_differences_name_the_minority():
    good, bad = "9f" * 32, "1a2b" * 16
    assert agreement.disagreements("code", [good] * 4) == []
    assert agreement.disagreements("code", [good, good, good, bad]) == [
        "worker 3: code 1a2b1a2b1a2b… differs from 9f9f9f9f9f9f… on workers 0,1,2"
    ]
    assert agreement.disagreements("packages", ["jax=2", "jax=1", "jax=1"]) == [
        "worker 0: packages jax=2 differs from jax=1 on workers 1,2"
    ]
    assert agreement.disagreements("code", ["a", "b"]) == ["worker 1: code b differs from a on workers 0"]


def test_alone_there_is_nobody_to_disagree_with(tmp_path, lm_run):
    agreement.check_devices(pod())
    run_file = tmp_path / "run.yaml"
    run_file.write_text("a: 1")
    agreement.check_agreement(run_file, RunFile.model_validate(lm_run))
    assert runtime.gather_texts("alone") == ["alone"]


@pytest.mark.parametrize(("facts", "threads"), [({"devices": 256}, "512"), ({"devices": 256, "workers": 4}, "128")])
def test_virtual_devices_get_threads(monkeypatch, facts, threads):
    """A choice of the user's stands."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for chosen, backend, expected in ((None, "tpu", None), ("3", "cpu", "3"), (None, "cpu", threads)):
        monkeypatch.delenv("PJRT_NPROC", raising=False)
        if chosen:
            monkeypatch.setenv("PJRT_NPROC", chosen)
        runtime.set_cpu_threads(pod(**facts | {"backend": backend}))
        assert os.environ.get("PJRT_NPROC") == expected


PAGE_FAULTS = """
import resource, threading
import numpy as np
from tests.trainer.distributed.test_agreement import pod
from trainer.distributed import runtime
def count_faults(megabytes):
    for first in (True, False):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(2 if first else 20):
            np.ones(megabytes << 20, np.int8)
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
# a thread each: a second one may get another heap, because join returns before the first has given its own back
for backend in ("tpu", "cpu"):
    runtime.keep_freed_memory(pod(backend=backend))
    count_faults(80)
    thread = threading.Thread(target=count_faults, args=(40,))
    thread.start()
    thread.join()
"""


@pytest.mark.deep
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_arrays_on_cpu_reuse_freed_memory():
    """The kernel hands out a page at its first use, which it counts: in the main thread, and in another one's heap."""
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, check=True)
    faults = [int(count) for count in done.stdout.split()]
    assert all(kept < returned / 5 for returned, kept in zip(faults[:2], faults[2:], strict=True)), faults


def test_other_data_are_a_disagreement(tmp_path, lm_run, monkeypatch):
    """What worker 1 finds on its disk is not what worker 0 finds on its own."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text("a: 1")

    def gathered(text: str) -> list[str]:
        Path(lm_run["data"]["path"]).write_text("other")
        other = {"data.path": fingerprint.file_fingerprint(lm_run["data"]["path"])}
        return [text, json.dumps(json.loads(text) | other)]

    monkeypatch.setattr(agreement, "gather_texts", gathered)
    with pytest.raises(DisagreementError, match=r"^worker 1: data\.path .* differs from .* on workers 0$"):
        agreement.check_agreement(run_file, RunFile.model_validate(lm_run))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, {}),  # by hand: JAX asks the metadata server
        ({"SLIPWAY_WORKER": "1"}, {}),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.2:8482"}, {}),
        ({"SLIPWAY_WORKER": "1", "JAX_COORDINATOR_ADDRESS": "10.0.0.2:8482"}, {"process_id": 1}),
        ({"SLIPWAY_WORKER": "0", "TPU_WORKER_ID": "9", "JAX_COORDINATOR_ADDRESS": "10.0.0.2:8482"}, {"process_id": 0}),
        ({"TPU_WORKER_ID": "2", "JAX_COORDINATOR_ADDRESS": "10.0.0.2:8482"}, {"process_id": 2}),
    ],
)
def test_processes_are_told_who_they_are_and_may_be_silent_for_as_long_as_a_live_migration(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], expected: dict[str, Any]
) -> None:
    for name in ("SLIPWAY_WORKER", "TPU_WORKER_ID", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: asked.append(options))
    runtime.join_processes(pod(workers=3), timeout_seconds=60)
    usual = {"initialization_timeout": 60, "heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 20}
    if expected:
        expected |= {"coordinator_address": "10.0.0.2:8482", "cluster_detection_method": "deactivate"}
    assert asked == [{"num_processes": 3, **usual, **expected}]


@pytest.mark.parametrize(("told", "own"), [("1", 0), ("0", 1), ("3", 2)])
def test_another_order_of_the_workers_than_that_of_the_chips_is_an_error(
    monkeypatch: pytest.MonkeyPatch, told: str, own: int
) -> None:
    monkeypatch.setenv("SLIPWAY_WORKER", told)
    monkeypatch.setattr(jax, "process_index", lambda: own)
    with pytest.raises(agreement.WrongDevicesError, match=f"calls this worker {told}, the TPU runtime process {own}"):
        agreement.check_devices(pod(workers=4))
    agreement.check_devices(pod())  # a sampler, which is alone


def test_names_and_contents_count(tmp_path):
    for name, files in {"a": "x1 y2", "b": "x1 y2", "c": "x1 z2", "d": "x1 y3"}.items():
        (tmp_path / name / "data").mkdir(parents=True)
        for file, text in files.split():
            (tmp_path / name / "data" / file).write_text(text)

    def found(path: str) -> str:
        return fingerprint.file_fingerprint(str(tmp_path / path))

    whole = [found(f"{name}/data") for name in "abcd"]
    assert whole[0] == whole[1]
    assert len(set(whole)) == 3
    assert found("a/data/x") == found("b/data/x")
    assert found("a/data/?") == found("b/data/[x-z]")
    assert found("none") == "absent"


@pytest.mark.parametrize("at", [0, fingerprint.MAX_FULL_HASH_BYTES])
def test_of_a_large_file_the_ends_count(tmp_path, at):
    data = bytearray(fingerprint.MAX_FULL_HASH_BYTES + 1)
    file = tmp_path / "large"
    file.write_bytes(data)
    before = fingerprint.file_fingerprint(str(file))
    data[at] = 1
    file.write_bytes(data)
    assert fingerprint.file_fingerprint(str(file)) != before

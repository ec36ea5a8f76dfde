"""The stand-ins are strict: an unknown flag, a missing asset or an odd worker ends them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

STANDINS = ROOT / "controller" / "rehearsal" / "standins"
NASH = ["-m", "nash_mhc.train", "--mesh-data=2", "--checkpoint-dir=checkpoints"]


def start(folder: Path, *words: str, worker: int = 0, hosts: str = "127.0.0.1", **more: str) -> subprocess.Popen[str]:
    run = folder / f"run-{worker}"
    run.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(STANDINS), "WANDB_MODE": "offline", **more}
    environment |= {"TPU_WORKER_ID": str(worker), "TPU_WORKER_HOSTNAMES": hosts, "JAX_NUM_CPU_DEVICES": "1"}
    environment |= {"SLIPWAY_RUN_DIR": str(run)}
    argv, out = [sys.executable, *words], subprocess.PIPE
    return subprocess.Popen(argv, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def test_an_unknown_flag_or_a_mesh_that_is_not_the_devices_ends_it(tmp_path: Path) -> None:
    code, said = finish(start(tmp_path, *NASH, "--no-such-flag=1"))
    assert (code, "unrecognized arguments: --no-such-flag" in said) == (2, True)
    code, said = finish(start(tmp_path, *NASH))
    assert (code, "does not make the 1 devices" in said) == (3, True)


def test_a_missing_variable_or_asset_ends_it(tmp_path: Path) -> None:
    simply = ["launch_simply.py", "--experiment_config=lm_test", "--experiment_dir=out"]
    words = [str(STANDINS / simply[0]), *simply[1:]]
    code, said = finish(start(tmp_path, *words))
    assert (code, "not set: SIMPLY_MODELS" in said) == (1, True)
    places = {name: str(tmp_path) for name in ("SIMPLY_MODELS", "SIMPLY_DATASETS", "SIMPLY_VOCABS")}
    code, said = finish(start(tmp_path, *words, **places))
    assert (code, "_METADATA is missing" in said) == (1, True)


@pytest.mark.parametrize("code_of_1", ["a", "b"])
def test_workers_meet_and_an_odd_one_is_named(code_of_1: str, tmp_path: Path) -> None:
    hosts = f"127.0.{7 if code_of_1 == 'a' else 8}.1,127.0.0.1"  # an address of its own: the port is a fixed one
    codes = enumerate(["a", code_of_1])
    both = [start(tmp_path, *NASH, worker=n, hosts=hosts, SLIPWAY_CODE_SHA256=code) for n, code in codes]
    ends = [finish(one) for one in both]
    if code_of_1 == "a":
        assert [code for code, _ in ends] == [0, 0], ends
        assert "checkpoint 8" in ends[0][1]
    else:
        assert [code for code, _ in ends] == [4, 4], ends
        assert "the workers disagree" in ends[1][1]

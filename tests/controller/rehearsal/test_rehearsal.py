"""Each file of conf/experiment is rehearsed: on its own emulated pod, through a bucket, with a preemption."""

import json
import os
import re
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from controller.cli import main
from controller.cloud import emulator
from controller.cloud.emulator import mark_in_use
from controller.config.compose import config_groups
from controller.core.errors import CloudError
from controller.localcloud.lifecycle import find_endpoint
from controller.localcloud.vms.image import process_marker
from controller.localcloud.vms.processes import MARKER, kill_marked
from tests.conftest import deep
from tests.emulators import Emulators

pytestmark = pytest.mark.e2e
FAST = "cloud.operation_seconds=0"
FLAGSHIP = "gemma2b_gsm8k tpu.accelerator_type=v4-16 tpu.zone=us-central2-b loop.steps=3 loop.updates_per_rollout=1"
"""Half as many workers and devices, which is what every run of the tests has time for."""
ADOPTED = {"trm_sudoku_stable1", "trm_stable1"}
"""Their pod may not be replaced, hence is not preempted; its SSH fails instead, and so does the API."""
RESUMED = re.compile(
    "preempted .*: replaced, and the program "
    r"(resumed: 2 attempts|started again: 2 attempts; at step [2-9] of \d; no step arrived)"
)
"""The second: on a busy machine no line of the first attempt may arrive before the preemption."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulators: Emulators) -> Path:
    """A state folder; the emulated clouds of rehearsals are forked."""
    monkeypatch.setattr(emulator, "run_emulator_verb", emulators.run_emulator_verb)
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def rehearse(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.run(["rehearse", FAST, *words])
    out, err = capsys.readouterr()
    return code, out, err


def nothing_runs(home: Path) -> bool:
    """No emulated cloud below this folder serves, and no process of its workers lives."""
    running = [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or [])]
    clouds = [folder / "localcloud" for folder in (home / "rehearsals").iterdir()]
    served = [cloud for cloud in clouds if find_endpoint(cloud) or kill_marked(process_marker(cloud.resolve()))]
    return not running and not served


def nothing_is_left(home: Path) -> bool:
    return nothing_runs(home) and not list((home / "rehearsals").iterdir())


@pytest.mark.parametrize("experiment", [FLAGSHIP, *deep(*config_groups()["experiment"])])
def test_an_experiment_is_preempted_and_goes_on(
    experiment: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = rehearse(capsys, *f"+experiment={experiment}".split(), "cloud.project=my-own", "--json")
    assert code == 0, err
    facts = json.loads(out.splitlines()[-1])["facts"]
    proven = "\n".join(fact["words"] for fact in facts if fact["proven"])
    assert [fact["words"] for fact in facts if not fact["proven"]] == []
    assert " shared resources created, and unchanged when observed again\n" in proven
    assert experiment != FLAGSHIP or "fetched from an emulated Hugging Face Hub: hf://google/gemma-2-2b/*\n" in proven
    if experiment in ADOPTED:
        assert "ssh_refused (seconds 2.0): overcome" in proven
        assert "stable-1 still exists; no other billed resource does" in proven
    else:
        assert RESUMED.search(proven), proven
        assert "no billed resource is left" in proven
    assert nothing_is_left(home)


@pytest.mark.deep
def test_a_failure_is_kept_for_a_look_and_a_fault_that_never_came_proves_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Path("hello.txt").write_text("hello\n")
    mine = ["program=command", "program.command=[cat,goodbye.txt]", "tpu=v5litepod_8"]
    code, _, err = rehearse(capsys, *mine)
    assert code == 5
    assert "goodbye.txt" in err
    assert nothing_runs(home)
    look = re.search(r"inspect it with `slipway (status .*?)`", err)
    assert look
    assert main.run([*shlex.split(look[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pod"]["state"] == "ready"
    Path("goodbye.txt").write_text("bye\n")
    faults = "{kind: stockout, times: 1}, {kind: preempted, after_object: nowhere}"
    code, out, err = rehearse(capsys, *mine, f"cloud.faults=[{faults}]")
    assert (code, err) == (2, "")
    assert "✓ stockout (times 1): overcome" in out
    assert "✗ preempted (after_object nowhere): did not occur" in out
    assert out.count("✗") == 1
    assert max(map(len, out.splitlines())) <= 80
    assert "slipway get" not in out
    assert nothing_is_left(home)


@pytest.mark.parametrize(
    ("where", "error", "code"),
    [
        ("reconcile", CloudError("no quota"), 2),  # of the pod that is to be adopted, which is made before the run
        ("drive", KeyboardInterrupt(), 130),
        ("Rehearsal.checks", ValueError("a bug"), None),
    ],
)
def test_no_error_leaves_the_emulated_cloud_running(
    where: str, error: BaseException, code: int | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        """Leave a process of a worker behind, as a supervisor is, and fail."""
        [cloud] = (home / "rehearsals").glob("*/localcloud")
        assert find_endpoint(cloud)
        left.append(subprocess.Popen(["sleep", "1000"], env={MARKER: process_marker(cloud.resolve()) + "worker"}))
        if isinstance(error, KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)  # as Ctrl-C, and as a terminal that is closed
        raise error

    Path("hello.txt").write_text("hello\n")
    left: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr("controller.rehearsal.rehearsal.drive", lambda *_: None)
    monkeypatch.setattr(f"controller.rehearsal.rehearsal.{where}", fail)
    pod = ["tpu=v5litepod_8", *(["tpu.adopt=true", "tpu.name=stable-1"] if where == "reconcile" else [])]
    with suppress(ValueError):
        assert main.run(["rehearse", FAST, "program=command", "program.command=[date]", *pod]) == code
    assert left[0].wait() == -signal.SIGKILL
    assert nothing_runs(home)


def test_two_of_one_name_do_not_get_into_each_others_way(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hello.txt").write_text("hello\n")
    mine = ["program=command", "program.command=[cat,hello.txt]", "tpu=v5litepod_8"]
    with mark_in_use(home / "rehearsals" / "run" / "localcloud"):
        code, _, err = rehearse(capsys, *mine)
    assert code == 2
    assert "run.name: a rehearsal of run is running" in err

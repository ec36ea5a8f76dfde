"""`rehearse`: what it says of pods, faults and failures. tests/controller/rehearsal/ rehearses every experiment."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.cloud.emulator import mark_in_use
from controller.core.errors import CloudError
from controller.localcloud.lifecycle import find_endpoint
from controller.localcloud.vms.image import process_marker
from controller.localcloud.vms.processes import MARKER
from tests.controller.rehearsal.test_rehearsal import FAST, home, nothing_is_left, nothing_runs, rehearse

__all__ = ["home"]
pytestmark = pytest.mark.e2e


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

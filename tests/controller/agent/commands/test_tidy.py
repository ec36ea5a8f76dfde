"""A worker before the next program: stale locks, leftovers, huge pages."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.controller.agent.conftest import AgentWorker, ProgramRun, wait_for


@pytest.fixture
def place(worker: AgentWorker, tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    worker.extra_environment |= {"TMPDIR": str(tmp_path / "tmp"), "SLIPWAY_SYSFS": str(tmp_path / "sys")}
    return tmp_path


def without_sudo(worker: AgentWorker, place: Path) -> Path:
    """A sudo that refuses, on a worker whose Python starts with the modules in `place`."""
    (tools := place / "tools").mkdir()
    (tools / "sudo").write_text("#!/bin/sh\nexit 1\n")
    (tools / "sudo").chmod(0o700)
    worker.extra_environment |= {"PYTHONPATH": str(place), "PATH": f"{tools}:{worker.environment['PATH']}"}
    return tools / "sudo"


def test_a_stale_lock_goes_and_one_that_is_held_stays(worker: AgentWorker, place: Path) -> None:
    (lock := place / "tmp/libtpu_lockfile").touch()
    assert worker.call("observe")["untidy"] == [f"stale {lock}"]
    with lock.open() as held:
        assert held
        assert worker.call("observe")["untidy"] == []
        assert worker.call("tidy")["done"] == []
        assert lock.exists()
    assert worker.call("tidy") == {"done": [f"removed the stale {lock}"], "not_done": []}
    assert not lock.exists()
    assert worker.call("observe")["untidy"] == []


def test_the_lock_of_another_user_stays_where_nobody_can_see_whether_it_is_held(
    worker: AgentWorker, place: Path
) -> None:
    """On an adopted pod others run programs too, and without sudo their open files are hidden."""
    (lock := place / "tmp/libtpu_lockfile").touch()
    (place / "sitecustomize.py").write_text("import os\nos.getuid = lambda: 54321\n")
    sudo = without_sudo(worker, place)
    assert worker.call("observe")["untidy"] == []
    assert worker.call("tidy") == {"done": [], "not_done": []}
    assert lock.exists()
    sudo.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    assert worker.call("tidy")["done"] == [f"removed the stale {lock}"]
    assert not lock.exists()


def test_huge_pages_are_switched_on(worker: AgentWorker, place: Path) -> None:
    (switch := place / "sys/kernel/mm/transparent_hugepage/enabled").parent.mkdir(parents=True)
    switch.write_text("always [madvise] never\n")
    assert worker.call("observe")["untidy"] == ["transparent huge pages are off"]
    assert worker.call("tidy")["done"] == ["transparent huge pages: always"]
    assert switch.read_text() == "always"
    assert worker.call("observe")["untidy"] == []


def test_what_may_not_be_switched_on_is_noted_once(worker: AgentWorker, place: Path) -> None:
    (switch := place / "sys/kernel/mm/transparent_hugepage/enabled").parent.mkdir(parents=True)
    switch.write_text("always [madvise] never\n")
    without_sudo(worker, place)
    refuse = "import pathlib\ndef no(*_, **__): raise PermissionError\npathlib.Path.write_text = no\n"
    (place / "sitecustomize.py").write_text(refuse)  # the tests may run as root, who may do anything
    assert "cannot run sudo" in worker.call("tidy")["not_done"][0]
    assert worker.call("observe")["untidy"] == []
    worker.boot_id = "boot-2"
    assert worker.call("observe")["untidy"] == ["transparent huge pages are off"]


def test_what_an_earlier_attempt_left_is_ended_and_nothing_else(run: ProgramRun, place: Path) -> None:
    """A supervisor ends what its program leaves; here a process is put into its place afterwards."""
    run.start("pass")
    run.wait_ended()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    marked = {"SLIPWAY_RUN_DIR": str(run.folder), "SLIPWAY_ATTEMPT": "1"}
    mine = subprocess.Popen(sleep, env=marked)
    other = subprocess.Popen(sleep, env={**marked, "SLIPWAY_RUN_DIR": "/elsewhere"})
    try:
        wait_for(lambda: run.worker.call("observe")["untidy"])
        assert run.worker.call("observe")["untidy"] == [f"process {mine.pid} of run-1, attempt-1"]
        assert run.worker.call("tidy")["done"] == ["killed leftover processes of run-1, attempt-1"]
        assert mine.wait(240) < 0
        assert other.poll() is None
        assert run.worker.call("observe")["untidy"] == []
    finally:
        mine.kill()
        other.kill()
        mine.wait()
        other.wait()


def test_while_a_program_runs_nothing_is_touched(run: ProgramRun, place: Path) -> None:
    run.start("import time; time.sleep(600)")
    (lock := place / "tmp/libtpu_lockfile").touch()
    assert run.worker.call("observe")["untidy"] == []
    assert run.worker.call("tidy")["done"] == []
    assert lock.exists()
    pid = json.loads((run.folder / "attempt-1/pid.json").read_text())["program"]["pid"]
    assert psutil.pid_exists(pid)
    run.worker.call("stop", run_id="run-1")

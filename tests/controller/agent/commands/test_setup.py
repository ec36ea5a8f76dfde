"""A worker before the program: its setup, by hash; stale locks and leftovers; fingerprints of the data it reads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from controller.config.run_yaml import render
from tests.composed import config_of
from tests.controller.agent.conftest import AgentWorker, ProgramRun, wait_for
from tests.paths import ROOT

COUNT = ["sh", "-c", 'echo x >> "$SLIPWAY_RUN_DIR/count"; echo made > built.txt']


def setup(run: ProgramRun, *commands: list[str], key: str = "k1", **payload: Any) -> dict[str, Any]:
    order = {"run_id": run.run_id, "key": key, "commands": commands, "code": run.code, "venv": "image", **payload}
    return run.worker.call("run_setup", **order)


def times(run: ProgramRun) -> int:
    return len((run.folder / "count").read_text().split())


def test_it_runs_once_and_again_when_its_key_changes(run: ProgramRun) -> None:
    assert run.worker.call("observe", run_id=run.run_id, venv="image")["setup"] is None
    assert setup(run, COUNT) == {"changed": True}
    assert setup(run, COUNT) == {"changed": False}
    assert run.worker.call("observe", run_id=run.run_id, venv="image")["setup"] == "k1"
    assert setup(run, COUNT, key="k2") == {"changed": True}
    assert times(run) == 2


def test_the_program_finds_what_it_made_and_its_packages_stay(run: ProgramRun) -> None:
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    install = ["sh", "-c", f'mkdir "$(python -c "{site}")/tiny_thing-1.dist-info"']
    setup(run, COUNT, install)
    seen = run.worker.call("observe", venv="image")["venv"]
    assert (seen["ok"], seen["versions"]["tiny-thing"]) == (True, "1")
    assert "tiny-thing" not in seen["installed"]
    run.start("print(open('built.txt').read())")
    assert run.wait_ended()["log_tail"].strip() == "made"


def test_a_failure_shows_the_end_of_what_it_printed_and_is_tried_again(run: ProgramRun) -> None:
    order = {"run_id": run.run_id, "key": "k", "code": run.code, "venv": "image"}
    said = run.worker.call_error("run_setup", commands=[["sh", "-c", "echo boom; exit 3"]], **order)
    assert said["error"] == "setup command `sh -c 'echo boom; exit 3'` ended with code 3"
    assert "boom" in said["detail"]
    said = run.worker.call_error("run_setup", commands=[["no-such-tool"]], **order)
    assert "cannot start" in said["error"]
    assert setup(run, COUNT, key="k") == {"changed": True}


def test_a_venv_made_anew_is_set_up_anew(run: ProgramRun) -> None:
    setup(run, COUNT)
    [mark] = (run.worker.root / "venv").glob("*/slipway.json")
    mark.unlink()
    run.worker.call("install_venv", packages="image", fingerprint="image", python="3")
    assert run.worker.call("observe", run_id=run.run_id, venv="image")["setup"] is None
    assert setup(run, COUNT) == {"changed": True}


def test_variables_arrive_and_the_venv_is_wanted(run: ProgramRun, worker: AgentWorker) -> None:
    """A tool that Slipway has installed is found, as uv on a TPU VM, whose image has none."""
    own = run.worker.root / "uv" / "bin" / "our-own-uv"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text("#!/bin/sh\necho installed > installed.txt\n")
    own.chmod(0o755)
    show = ["sh", "-c", 'echo "$TOKEN" > seen; which python >> seen']
    setup(run, ["our-own-uv", "pip", "install"], show, secrets={"TOKEN": "t"})
    assert (run.folder / "work" / "installed.txt").read_text() == "installed\n"
    token, python = (run.folder / "work/seen").read_text().split()
    assert token == "t"
    assert python.startswith(str(worker.root / "venv"))
    order = {"run_id": "run-9", "key": "k", "commands": [["true"]], "code": run.code, "venv": "f00"}
    assert "install it first" in worker.call_error("run_setup", **order)["error"]


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


@pytest.fixture
def worker_with_run(worker: AgentWorker) -> AgentWorker:
    """A worker with the trainer's code, and a run whose data are in its home."""
    config = config_of("+experiment=lm_tinyshakespeare", "data.path='~/text.txt'")
    (worker.root / "runs/run-1").mkdir(parents=True)
    (worker.root / "runs/run-1/run.yaml").write_text(render(config, "run-1", "bucket", {}))
    (worker.root / "code/7ee").mkdir(parents=True)
    for package in ("conf", "trainer"):
        (worker.root / "code/7ee" / package).symlink_to(ROOT / package)
    return worker


def test_it_is_taken_freshly_by_the_trainers_own_code(worker_with_run: AgentWorker) -> None:
    def ask() -> dict[str, str]:
        return worker_with_run.call("fingerprint_data", run_id="run-1", code="7ee", venv="none")["data"]

    text: Path = worker_with_run.home / "text.txt"
    assert ask() == {"data.path": "absent"}
    text.write_text("one")
    before = ask()
    text.write_text("two")
    assert before["data.path"] != ask()["data.path"] != "absent"


def test_what_is_missing_on_the_worker_is_said(worker_with_run: AgentWorker) -> None:
    wanted = {"run_id": "run-1", "code": "7ee", "venv": "none"}
    for change, said in (
        ({"run_id": "run-2"}, "run.yaml is missing"),
        ({"code": "0"}, "the code is missing"),
        ({"venv": "f1"}, "python is not installed on this worker"),
    ):
        assert said in worker_with_run.call_error("fingerprint_data", **wanted | change)["error"]

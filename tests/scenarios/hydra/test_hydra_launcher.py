"""`hydra/launcher=slipway`: Hydra apps of other people, each started in a folder of its own."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from controller import emulator
from controller.localcloud import lifecycle
from controller.localcloud.vms.image import process_marker
from controller.localcloud.vms.processes import kill_marked
from tests.conftest import wide
from tests.controller.cli.verbs.test_up import until
from tests.controller.conftest import SlipwayCli
from tests.paths import ROOT
from tests.scenarios.unattended.test_two_controllers import launches

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
APPS = ROOT / "tests" / "fixtures" / "hydra_apps"
SLIPWAY = ["hydra/launcher=slipway", "hydra.launcher.cloud=local", "hydra.launcher.tpu=v5litepod-1"]


@dataclass
class App:
    """A copy of an app, in a git repository of its own."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *words: str) -> subprocess.Popen[str]:
        # An installed Slipway has this folder on sys.path.
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "controller" / "installed")}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
        self.started.append(subprocess.Popen([sys.executable, *words], cwd=self.folder, **pipes))
        return self.started[-1]

    def run(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        out, _ = process.communicate(timeout=600)
        return process.returncode, out

    def results(self, pattern: str) -> dict[str, dict[str, Any]]:
        """What the folder of each job says about it, by the folder's name, of the last multirun."""
        last = max(self.folder.glob(pattern), key=lambda folder: folder.stat().st_mtime_ns)
        return {file.parent.name: json.loads(file.read_text()) for file in sorted(last.glob("*/slipway.json"))}


def started(slipway: SlipwayCli) -> Counter[str]:
    """How often each run was launched."""
    return Counter(name.split("/")[1] for name in launches(slipway))


def finished(slipway: SlipwayCli) -> set[str]:
    objects = slipway.cloud().get("state")["objects"]
    return {name.split("/")[1] for names in objects.values() for name in names if name.endswith("/result.json")}


def reboot(slipway: SlipwayCli, app: subprocess.Popen[str]) -> None:
    """End all processes: the app, its controller, the emulated cloud and everything on its workers."""
    cloud = emulator.state_folder(str(slipway.home))
    server = lifecycle.find_endpoint(cloud)
    assert server is not None
    ended = [psutil.Process(server["pid"]), *psutil.Process(app.pid).children(recursive=True), psutil.Process(app.pid)]
    for process in ended:
        with suppress(psutil.NoSuchProcess):  # it ended by itself
            process.kill()
    kill_marked(process_marker(cloud.resolve()))
    app.communicate(timeout=300)


@pytest.fixture
def app(slipway: SlipwayCli, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    folder = tmp_path / "an app"
    shutil.copytree(APPS / request.param, folder)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    copy = App(folder)
    yield copy
    for process in copy.started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("app", ["structured"], indirect=True)
def test_an_error_is_its_jobs_own_and_a_finished_job_is_not_repeated(slipway: SlipwayCli, app: App) -> None:
    code, out = app.run("app.py", "-m", *SLIPWAY, "lr=0.5,9", "hydra.sweep.dir=multirun/first")
    assert code == 1, out
    assert "Error executing job with overrides: ['lr=9']" in out
    assert "ValueError: the loss is not a number with lr=9.0" in out
    jobs = app.results("multirun/first")
    assert [job["state"] for job in jobs.values()] == ["finished", "failed"]
    assert (app.folder / "multirun" / "first" / "0" / "loss.txt").read_text() == "5.0\n"
    assert (app.folder / "multirun" / "first" / "0" / ".hydra" / "config.yaml").exists()
    before = launches(slipway)
    assert len(before) == 2
    # Files that the first multirun has left are no part of the code; nor are those that Python compiled.
    code, out = app.run("app.py", "-m", *SLIPWAY, "lr=0.5", "hydra.sweep.dir=multirun/second")
    assert code == 0, out
    assert launches(slipway) == before
    assert app.results("multirun/second")["0"]["run"] == jobs["0"]["run"]
    assert (app.folder / "multirun" / "second" / "0" / "loss.txt").read_text() == "5.0\n"


@pytest.mark.parametrize("app", ["structured"], indirect=True)
@pytest.mark.parametrize("how", ["ctrl-c", *wide("kill -9")])
def test_an_interrupted_multirun_goes_on_without_running_anything_twice(
    slipway: SlipwayCli, app: App, how: str
) -> None:
    go = slipway.home / "go"
    words = ["app.py", "-m", *SLIPWAY, "hydra.launcher.pods=2", "lr=0.1,0.2,0.3", f"wait_for={go}"]
    first = app.start(*words)
    until(lambda: len(launches(slipway)) == 2, seconds=300)
    first.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGKILL)
    out, _ = first.communicate(timeout=300)  # the process that drives the jobs has let go of the pipe
    assert "detached: active runs continue" in out
    before = launches(slipway)
    go.touch()
    code, out = app.run(*words)
    assert code == 0, out
    assert "3 finished" in out
    assert launches(slipway)[:2] == before or set(before) < set(launches(slipway))
    assert len(launches(slipway)) == 3
    assert slipway.cloud().get("state")["node"] == {}


@pytest.mark.wide
@pytest.mark.parametrize("app", ["structured"], indirect=True)
def test_a_search_goes_on_after_a_reboot_and_runs_nothing_twice(
    slipway: SlipwayCli, app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, go = tmp_path / "tmp", tmp_path / "go"
    monkeypatch.setenv("TMPDIR", str(temporary))
    temporary.mkdir()
    go.touch()
    words = ["app.py", "-m", *SLIPWAY, "hydra.launcher.pods=2", "hydra/sweeper=asking", f"wait_for={go}"]
    first = app.start(*words)
    until(lambda: finished(slipway) != set(), seconds=300)  # the first batch is one job
    go.unlink()
    until(lambda: len(started(slipway)) - len(finished(slipway)) == 2, seconds=300)  # two jobs of a later batch
    reboot(slipway, first)
    shutil.rmtree(temporary)
    temporary.mkdir()
    before, done = started(slipway), finished(slipway)
    assert len(done) < len(before)
    go.touch()
    code, out = app.run(*words)
    assert code == 0, out
    tried = ast.literal_eval(out.rpartition("tried ")[2].splitlines()[0])
    assert len(tried) == 6
    assert all(value == pytest.approx(10 * rate) for rate, value in tried)
    after = started(slipway)
    assert len(after) == 6, "the sweeper proposed the same jobs as before the reboot"
    created = [line for line in slipway.mutations() if re.fullmatch(r"POST .*/(nodes|queuedResources)", line)]
    assert len(created) <= 2, "pods stay from batch to batch"
    assert {run for run, count in after.items() if count > 1} <= set(before) - done
    assert max(after.values()) <= 2
    assert slipway.cloud().get("state")["node"] == {}
    code, out, _ = slipway("status", "--sweep", "app")
    assert "6 finished" in out, out  # all batches are one sweep


@pytest.mark.wide
@pytest.mark.parametrize("app", ["grouped"], indirect=True)
def test_a_module_with_a_package_conf_and_the_launcher_in_its_config(slipway: SlipwayCli, app: App) -> None:
    (app.folder / "requirements.txt").write_text("hydra-core\n")  # not installed: the emulated workers have it
    code, out = app.run("-m", "lab.train", "-m", "model=small,big")
    assert code == 0, out
    jobs = app.results("results/*")
    assert list(jobs) == ["0-small", "1-big"]
    found = {name: json.loads(next(app.folder.glob(f"results/*/{name}/found.json")).read_text()) for name in jobs}
    assert found == {"0-small": {"width": 8, "seed": 0}, "1-big": {"width": 32, "seed": 1}}
    before = launches(slipway)
    assert app.run("-m", "lab.train", "-m", "model=small,big")[0] == 0
    assert launches(slipway) == before

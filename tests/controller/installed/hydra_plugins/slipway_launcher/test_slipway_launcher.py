"""The launcher under Hydra itself and a sweeper that calls it several times; a fake controller runs the jobs."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from controller.config.compose import with_overrides
from tests.paths import ROOT

INSTALLED = "controller/installed"
CONTROLLER = '''
"""Remembers finished jobs, and is interrupted when as many have run as the file `interrupt` says."""
import json, pathlib, sys

home = pathlib.Path(__file__).parents[2]
request = json.loads(pathlib.Path(sys.argv[1]).read_text())
with (home / "requests").open("a") as log:
    log.write(json.dumps(request) + "\\n")
answers, limit = [], int((home / "interrupt").read_text())
for job in request["jobs"]:
    ran = (home / "ran").read_text().splitlines()
    [rate] = [word for word in job["words"] if word.startswith("lr=")]
    if rate not in ran:
        if len(ran) == limit:
            sys.exit(130)
        (home / "ran").write_text("\\n".join([*ran, rate]))
    answer = {"run": "app-1", "state": "finished", "error": "", "results": ""}
    answers.append(answer | {"return_value": 10 * float(rate[3:])})
pathlib.Path(sys.argv[2]).write_text(json.dumps({"format": 1, "jobs": answers}))
'''


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the launcher as it is installed in a clone, the fake controller beside it, and an app."""
    plugin = f"{INSTALLED}/hydra_plugins/slipway_launcher"
    shutil.copytree(ROOT / plugin, tmp_path / plugin)
    shutil.copytree(ROOT / "tests" / "fixtures" / "hydra_apps" / "structured", tmp_path / "app")
    (tmp_path / "controller" / "multirun").mkdir(parents=True)
    (tmp_path / "controller" / "multirun" / "__main__.py").write_text(CONTROLLER)
    (tmp_path / "ran").touch()
    return tmp_path


def multirun(place: Path, day: str, interrupt: int) -> tuple[int, str, list[dict[str, Any]]]:
    """The exit code, the output and the requests of a multirun that is interrupted after so many jobs."""
    (place / "interrupt").write_text(str(interrupt))
    (place / "requests").write_text("")
    words = ["hydra/launcher=slipway", "hydra/sweeper=growing", f"hydra.sweep.dir=multirun/{day}", "steps=10"]
    argv, environment = [sys.executable, "app.py", "-m", *words], {**os.environ, "PYTHONPATH": f"{place}/{INSTALLED}"}
    done = subprocess.run(argv, cwd=place / "app", env=environment, capture_output=True, text=True, check=False)
    requests = [json.loads(line) for line in (place / "requests").read_text().splitlines()]
    return done.returncode, done.stdout + done.stderr, requests


def test_a_sweeper_with_growing_batches_goes_on_where_it_was_interrupted(place: Path) -> None:
    code, out, requests = multirun(place, "monday", 4)
    assert code != 0
    assert [len(request["jobs"]) for request in requests] == [1, 2, 3, 0]
    before = (place / "ran").read_text().splitlines()
    assert len(before) == 4
    code, out, again = multirun(place, "tuesday", 100)
    assert code == 0, out
    tried = ast.literal_eval(out.rpartition("tried ")[2].splitlines()[0])
    rates = [rate for rate, _ in tried]
    assert (place / "ran").read_text().splitlines() == [f"lr={rate}" for rate in rates]
    assert [value for _, value in tried] == [10 * rate for rate in rates]
    assert rates[:3] == [0.4, 0.2, 0.1]  # the second batch halves the first, the third the best of the second
    assert [len(request["jobs"]) for request in again] == [1, 2, 3, 0]
    assert [request["keep"] for request in again] == [True, True, True, False]
    assert len({request["batches"] for request in [*requests[:3], *again[:3]]}) == 1  # one sweep, on any day
    assert [job["words"] for job in again[2]["jobs"]] == [["steps=10", f"lr={rate}"] for rate in rates[3:]]


SETTINGS: dict[str, Any] = {
    "cloud": None, "pods": 1, "packages": None, "requirements": None, "setup": None, "overrides": [],
}  # fmt: skip


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / INSTALLED))
    from hydra_plugins.slipway_launcher import _app

    return _app


def config(hydra: str, **rest: Any) -> DictConfig:
    words = {"overrides": {"hydra": hydra.split()}, "job": {"num": "???", "name": "app"}}
    folders = {"run": {"dir": "outputs/${now:%Y}"}, "sweep": {"dir": "multirun/1"}}
    return OmegaConf.create({"hydra": {**words, **folders}, **rest})


def test_a_worker_gets_the_jobs_words_but_not_those_about_the_multirun(app: ModuleType) -> None:
    about = "hydra/launcher=slipway hydra.launcher.tpu=v6e-8 hydra/sweeper=optuna +hydra.sweeper.n_trials=3 "
    about += "hydra.sweep.dir=x hydra.mode=MULTIRUN hydra.run.dir=y "
    found = app.job_words(config(about + "hydra.verbose=true hydra/job_logging=none"), ["lr=1"], None)
    assert found == ["lr=1", "hydra.verbose=true", "hydra/job_logging=none"]
    numbered = app.job_words(config(""), ["lr=1"], 7)
    assert numbered == ["lr=1", "++hydra.job.num=7", "++hydra.job.id=7"]


def test_the_jobs_number_is_passed_on_where_the_config_refers_to_it(app: ModuleType) -> None:
    """And folders of outputs end where the time begins."""
    assert app.output_folders(config("")) == ["multirun", "multirun/1", "outputs"]
    assert app.refers_to_the_job_number(config("", model={"seed": "${hydra:job.num}"}))
    assert app.refers_to_the_job_number(config("", seed="${add:${hydra.job.id},1}"))
    assert not app.refers_to_the_job_number(config("", name="${hydra:job.name}"))


def test_settings_are_overrides_of_slipway(app: ModuleType) -> None:
    assert app.local_overrides(SETTINGS) == ["sweep.pods=1"]
    settings = {**SETTINGS, "cloud": "local", "requirements": "reqs.txt", "overrides": ["sweep.pods=3"]}
    words = ["cloud=local", "sweep.pods=1", "env.requirements=reqs.txt", "env.packages=requirements", "sweep.pods=3"]
    assert app.local_overrides(settings) == words
    commands = [["uv", "pip", "install", "a b"], ["sh", "-c", "echo '$X' ${y}"]]
    setup = app.local_overrides({**SETTINGS, "setup": commands})[-1]
    composed = OmegaConf.create(with_overrides({}, [setup]))
    assert OmegaConf.to_container(composed, resolve=True) == {"program": {"setup": commands}}

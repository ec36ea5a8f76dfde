"""What the launcher makes of Hydra's config: the words of a job on a worker, and Slipway's overrides."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from controller.config.compose import with_overrides
from tests.paths import ROOT

SETTINGS: dict[str, Any] = {
    "cloud": None, "pods": 1, "packages": None, "requirements": None, "setup": None, "overrides": [],
}  # fmt: skip


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "controller" / "installed"))
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
    assert app.refers_to_the_job_number(config("", model={"seed": "${hydra:job.num}"}))
    assert app.refers_to_the_job_number(config("", seed="${add:${hydra.job.id},1}"))
    assert not app.refers_to_the_job_number(config("", name="${hydra:job.name}"))


def test_folders_of_outputs_end_where_the_time_begins(app: ModuleType) -> None:
    assert app.output_folders(config("")) == ["multirun", "multirun/1", "outputs"]


def test_settings_are_overrides_of_slipway(app: ModuleType) -> None:
    assert app.local_overrides(SETTINGS) == ["sweep.pods=1"]
    settings = {**SETTINGS, "cloud": "local", "requirements": "reqs.txt", "overrides": ["sweep.pods=3"]}
    words = ["cloud=local", "sweep.pods=1", "env.requirements=reqs.txt", "env.packages=requirements", "sweep.pods=3"]
    assert app.local_overrides(settings) == words
    commands = [["uv", "pip", "install", "a b"], ["sh", "-c", "echo '$X' ${y}"]]
    setup = app.local_overrides({**SETTINGS, "setup": commands})[-1]
    composed = OmegaConf.create(with_overrides({}, [setup]))
    assert OmegaConf.to_container(composed, resolve=True) == {"program": {"setup": commands}}

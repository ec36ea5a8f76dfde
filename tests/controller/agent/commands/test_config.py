"""Fingerprints of the data that the trainer would read on a worker."""

from pathlib import Path

import pytest

from controller.config.compose import compose
from controller.config.run_yaml import render
from tests.controller.agent.conftest import AgentWorker
from tests.paths import ROOT


@pytest.fixture
def worker_with_run(worker: AgentWorker) -> AgentWorker:
    """A worker with the trainer's code, and a run whose data are in its home."""
    config, problems = compose(["+experiment=lm_tinyshakespeare", "data.path='~/text.txt'"])
    assert config is not None, problems
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

"""`status` of a finished run whose bucket was emptied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.records import index
from controller.records.restore import MissingInputsError
from controller.run import session

WHY = "--run q-1: its code is missing from gs://b/code/0a.tar.gz"
METRICS = {"accuracy_before": 0.4883, "accuracy_after": 0.8984}


@pytest.fixture(autouse=True)
def emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the table of two runs, and a bucket without their code."""
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    finished = {"run": "q-1", "state": "finished", "attempts": 2, "seconds": 242.0, "metrics": METRICS}
    index.append_rows(tmp_path, [finished, {"run": "q-2", "state": "running"}])

    @contextmanager
    def restored(*_: Any, **__: Any) -> Iterator[Any]:
        raise MissingInputsError(WHY)
        yield

    monkeypatch.setattr(session, "restored_run", restored)


def test_a_finished_run_is_shown_from_the_record_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["status", "--run", "q-1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "run  q-1: finished, 2 attempts, 4:02"
    assert "0.4883 → 0.8984" in out[1]
    assert out[2] == f"     from the record of this machine: {tmp_path / 'runs' / 'q-1'}"
    assert out[3].startswith("     its code is missing from gs://b/code/0a.tar.gz, so the run cannot be repeated")
    assert main.run(["status", "--run", "q-1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run"]["summary"], document["missing"]) == (METRICS, WHY)


def test_a_run_that_has_not_finished_needs_its_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["status", "--run", "q-2"]) == 2
    assert capsys.readouterr().err == f"error: {WHY}\n"

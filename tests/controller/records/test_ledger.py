"""The record of a run as it is read: whole, damaged, or by others' objects beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.core.clock import Clock
from controller.core.formats import DamagedRecordError, FormatError
from controller.gcp.folder_store import FolderClient
from controller.records.ledger import UNKNOWN_POD, Launch, Ledger, Result
from controller.recovery.policy import Incident

RUN = "runs/r-1"
GARBAGE = ["", "{", "[]", '{"attempt": 1}', '{"format": 1}', '{"format": 1, "attempt": {}, "run_id": 3}', "\udcff"]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(FolderClient(Clock()), str(tmp_path), "r-1")


def put(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / RUN / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode(errors="surrogateescape"))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_damaged_launch_keeps_its_number_and_is_named(ledger: Ledger, tmp_path: Path, garbage: str) -> None:
    assert ledger.record_launch(Launch(2, "pod", 10.0))
    put(tmp_path, "launches/0001.json", garbage)
    put(tmp_path, "launches/notes.txt", "somebody else's")
    first, second = ledger.launches()
    assert (first.attempt, first.node_uid, second) == (1, UNKNOWN_POD, Launch(2, "pod", 10.0))
    assert first.time == pytest.approx((tmp_path / RUN / "launches/0001.json").stat().st_mtime, abs=1)
    ledger.launches()
    [problem] = ledger.problems
    assert problem.startswith(f"{RUN}/launches/0001.json is damaged: ")
    ledger.report(here := "/home/me/.slipway/runs/r-1/record.json is damaged: no JSON")
    assert ledger.problem_urls == [f"{tmp_path}/{problem}", here]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_damaged_incident_is_left_out_and_named(ledger: Ledger, tmp_path: Path, garbage: str) -> None:
    put(tmp_path, "verdicts/0001.json", garbage)
    ledger.incidents(Incident.from_json)
    ledger.add_incident(Incident(1, "preempted", "gone", "replace_node", None, 1.0).to_json())
    assert [incident.kind for incident in ledger.incidents(Incident.from_json)] == ["preempted"]
    assert [problem.partition(" is ")[0] for problem in ledger.problems] == [f"{RUN}/verdicts/0001.json"]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_damaged_result_is_an_error_that_names_it(ledger: Ledger, tmp_path: Path, garbage: str) -> None:
    put(tmp_path, "result.json", garbage)
    with pytest.raises(DamagedRecordError, match=rf"{RUN}/result\.json is damaged: "):
        ledger.result()


def test_what_a_later_slipway_wrote_is_not_called_damaged(ledger: Ledger, tmp_path: Path) -> None:
    put(tmp_path, "launches/0001.json", '{"format": 99, "attempt": 1}')
    with pytest.raises(FormatError, match="99"):
        ledger.launches()


def test_a_result_is_read_as_it_was_written(ledger: Ledger) -> None:
    result = Result("r-1", "finished", 2, 20.0, 10.0, {"loss": 1.0}, "keep")
    assert ledger.result() is None
    ledger.record_result(result)
    ledger.record_result(Result("r-1", "finished", 3, 30.0, 20.0))
    assert ledger.result() == result

"""What the controller keeps in the bucket and on this machine, against golden files; and memory that is given back."""

import ctypes
import errno
import fcntl
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import yaml

from conf.formats import FORMAT, POD_VARIABLE, format_problem
from controller.agent import fs as agent_formats
from controller.config.run_yaml import render
from controller.core.events import Event
from controller.core.json_documents import FormatError, append_lines, checked, has_format
from controller.core.this_process import INTERVAL_SECONDS, FreedMemory
from controller.gcp.folder_store import ObjectMetadata
from controller.lease_store import LeaseRecord, ReleaseRequest
from controller.records import index, recorder
from controller.records.ledger import AlertRecord, Launch, Ledger, Result
from controller.records.spending import PodLifetime
from controller.recovery.responses import Incident
from controller.resources.deletions import PendingDeletion
from controller.resources.pod import capacity_log
from controller.resources.pod.capacity_log import CapacityEntry
from controller.ssh.agent_link import WorkerError
from controller.ssh.connection import Connection
from controller.sweep.board import SavedBoard
from tests.composed import config_of
from tests.fakes.clock import ManualClock
from tests.golden import golden
from tests.paths import ROOT

RUN = "quickstart-0a1b2c3d"
DOCUMENTS: dict[str, type[Any]] = {
    "lease": LeaseRecord,
    "release_request": ReleaseRequest,
    "launch": Launch,
    "result": Result,
    "verdict": Incident,
    "pod": PodLifetime,
    "deletion": PendingDeletion,
    "capacity": CapacityEntry,
    "board": SavedBoard,
    "alerts": AlertRecord,
    "object_metadata": ObjectMetadata,
    "event": Event,
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_what_its_golden_file_says_and_an_unknown_format_one_clear_error(name: str) -> None:
    read, body = DOCUMENTS[name].from_json, golden(name)
    document = read(body)
    assert isinstance(document, DOCUMENTS[name])
    assert json.loads(json.dumps(document.to_json())) == body
    assert next(iter(body)) == "format"
    with pytest.raises(FormatError, match=r"^here has format 2; this slipway reads format 1: update slipway$"):
        read(body | {"format": 2}, "here")
    del body["format"]
    with pytest.raises(FormatError, match=r"^here has no format; this slipway reads format 1: "):
        read(body, "here")


def test_the_record_and_its_row(tmp_path: Path) -> None:
    record, row = golden("record"), golden("row")
    run = record["run"]
    file = recorder.run_folder(tmp_path, run) / recorder.RECORD_FILE
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(record))
    known = recorder.load_record(tmp_path, run)
    assert known == checked(record, "record.json")
    assert recorder.row_from_record(known).items() <= row.items()
    variables = record["config"].get("env", {}).get("vars", {}) | {POD_VARIABLE: "2"}
    config = record["config"] | {"env": {"vars": variables}}
    beside = recorder.row_from_record({**known, "run": f"{run}-sampler-2", "config": config})
    assert beside["samples_for"] == run
    index.append_rows(tmp_path, [checked(row, "row")])
    assert json.loads(index.index_file(tmp_path).read_text()) == row
    assert index.load_rows(tmp_path) == [checked(row, "row")]
    for written in (file, index.index_file(tmp_path)):
        written.write_text(json.dumps(json.loads(written.read_text()) | {"format": 2}))
    with pytest.raises(FormatError, match=f"^{file} has format 2; "):
        recorder.load_record(tmp_path, run)
    left_out: list[index.LeftOut] = []
    assert index.load_rows(tmp_path, left_out) == []
    [later] = left_out
    assert (later.is_later, "has format 2; " in later.why) == (True, True)
    before = index.index_file(tmp_path).read_bytes()
    index.mend(tmp_path)
    assert index.index_file(tmp_path).read_bytes() == before, "a later slipway of this machine reads it"


def test_a_stopped_process_amid_an_append_holds_up_nobody(tmp_path: Path) -> None:
    """It keeps its lock for as long as it is stopped: by Ctrl-Z, or by a debugger."""
    table = index.index_file(tmp_path)
    append_lines(table, "[]\n")
    with table.open("ab") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        append_lines(table, '{"a": 1}\n')
        index.mend(tmp_path)
        assert table.read_text() == '[]\n{"a": 1}\n'
    index.mend(tmp_path)
    assert "a" not in table.read_text()


def test_a_file_system_without_locks_takes_lines_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    append_lines(tmp_path / "notes", "[]\n")
    append_lines(tmp_path / "notes", "{}\n")
    assert (tmp_path / "notes").read_text() == "[]\n{}\n"


def test_run_yaml() -> None:
    body = golden("run_yaml")
    config = config_of("+experiment=quickstart", "cloud=gcp", "tpu.accelerator_type=v5litepod-16", "run.seed=7")
    content = yaml.safe_load(render(config, RUN, "lab-slipway", {}))
    assert {key: content[key] for key in body} == body
    assert set(content) - set(body) == {"model", "data", "loop", "optimizer", "mesh", "checkpoint", "logging"}


def test_the_end_of_a_program_in_the_bucket() -> None:
    def ended(**body: Any) -> str | None:
        google = SimpleNamespace(read=lambda bucket, name: json.dumps(body).encode())
        return Ledger(cast(Any, google), "b", "r").exit_status(0, 1)

    assert ended(format=FORMAT, code=3, signal=None) == "code 3"
    assert ended(format=2, code=3) == "an end whose record is damaged"


def test_an_answer_of_the_agent() -> None:
    access: Any = SimpleNamespace(addresses=["10.0.0.2"])
    parse: Callable[[str, bytes], dict[str, Any]] = Connection(access, 0, cast(Any, None), cast(Any, None))._parse
    assert parse("tidy", b'{"format": 1, "done": [], "not_done": []}') == {"done": [], "not_done": []}
    for line, said in ((b'{"format": 2}', "has format 2"), (b"{}", "has no format")):
        with pytest.raises(WorkerError, match=f"the answer to `tidy` {said}; this slipway reads format 1"):
            parse("tidy", line)


@pytest.mark.parametrize("body", [None, [], {}, {"format": None}, {"format": 2}, {"format": "x" * 99}, {"format": 1}])
def test_the_agent_says_the_same(body: Any) -> None:
    problem = format_problem(body, "w")
    assert problem == agent_formats.format_problem(body, "w")
    assert (problem == "") == (body == {"format": FORMAT})
    assert len(problem) < 130
    assert has_format(body) is (isinstance(body, dict) and "format" in body)


BLOCKS, BLOCK_BYTES = 50_000, 2000


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_goes_back_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    freed = FreedMemory(clock)
    blocks = [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]
    last = bytearray(BLOCK_BYTES)  # what lies behind free memory keeps the C library from returning it
    del blocks
    kept = resident()
    clock.elapsed = INTERVAL_SECONDS - 1
    freed.return_if_due()
    assert resident() > kept - BLOCKS * BLOCK_BYTES / 10
    clock.elapsed = INTERVAL_SECONDS
    freed.return_if_due()
    assert resident() < kept - BLOCKS * BLOCK_BYTES / 2
    assert len(last) == BLOCK_BYTES
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    clock.elapsed = 3 * INTERVAL_SECONDS
    freed.return_if_due()  # of another C library nothing is asked


@pytest.mark.parametrize("changed", [{"format": 2}, {"format": None}, {"time": "yesterday"}, {"id": 5}, {"zone": None}])
def test_an_entry_of_capacity_that_is_none_of_ours_is_left_out(tmp_path: Path, changed: dict[str, Any]) -> None:
    entry = golden("capacity")
    file = capacity_log.capacity_file(tmp_path)
    file.write_text(f"{json.dumps(entry | changed)}\n{json.dumps(entry)}\n")
    damaged: list[int] = []
    assert [each.id for each in capacity_log.load_entries(tmp_path, damaged)] == [entry["id"]]
    assert damaged == [1]


def test_whoever_treats_both_kinds_of_unreadable_documents_alike_says_so_in_one_way() -> None:
    pairs = re.compile(r"except .*(DamagedRecordError, FormatError|FormatError, DamagedRecordError)")
    assert [str(file) for file in (ROOT / "controller").rglob("*.py") if pairs.search(file.read_text())] == []

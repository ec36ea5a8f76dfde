"""Files that grow, in a bucket: the bytes that are sent, and what is there after faults."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from controller.agent import supervisor
from controller.agent.control import finalize_attempt
from controller.agent.fs import write_json
from controller.agent.transfers import GrowingObject, TransferError, with_retries
from tests.fakes.loopback import FakeBucket

NAME = "runs/run-1/logs/attempt-1/worker-0.log"
MOST, FIRST_BYTES = 1.2, 4096
"""Bytes that may be sent of each byte that is written, at any length, and what the first requests may add to that."""


@pytest.fixture(autouse=True)
def _storage(bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_STORAGE_ROOT", bucket.url)


class Rounds:
    """Stands for the event that a program has ended: before each wait is over, the log has grown."""

    def __init__(self, log: Path, lines: list[bytes]) -> None:
        self.log, self.lines = log, lines

    def wait(self, seconds: float) -> bool:
        assert seconds >= supervisor.LOG_UPLOAD_SECONDS
        if self.lines:
            with self.log.open("ab") as file:
                file.write(self.lines.pop(0))
        return not self.lines


@pytest.mark.parametrize("times", [1, 10, 100])
def test_of_a_log_as_many_bytes_are_sent_as_are_written(bucket: FakeBucket, tmp_path: Path, times: int) -> None:
    """Whole logs at each upload would send 5 times as many at 10 x, and 50 times at 100 x."""
    log = tmp_path / "attempt-1/log"
    log.parent.mkdir()
    (tmp_path / "secrets").write_text(json.dumps({"format": 1, "variables": {"KEY": "hidden-word"}}))
    rounds: Any = Rounds(log, [b"%06d hidden-word %s hidden-" % (i, b"x" * 2000) for i in range(times)] + [b"word\n"])
    supervisor._upload_log_periodically(log.parent, copy := GrowingObject(log, "b", NAME), rounds)
    copy.send(log.stat().st_size)
    assert list(bucket.objects) == [NAME]
    assert bucket.objects[NAME] == log.read_bytes()
    assert b"hidden-word" not in log.read_bytes()[:-20]
    assert bucket.sent <= MOST * log.stat().st_size + FIRST_BYTES


@pytest.mark.parametrize("place", ["bucket", "folder"])
@pytest.mark.parametrize("disturb", ["nothing", "other bytes", "gone"])
def test_readers_see_one_file_and_what_others_have_changed_is_sent_whole(
    bucket: FakeBucket, tmp_path: Path, place: str, disturb: str
) -> None:
    path, folder = tmp_path / "file", str(tmp_path / "bucket")
    grown = GrowingObject(path, "b" if place == "bucket" else folder, NAME)
    for size in (0, 10, 10, 11, 5000):
        path.write_bytes(bytes(range(256))[:size] * (1 if size < 256 else 20))
        size = path.stat().st_size
        if size == 11 and disturb == "other bytes":
            bucket.objects[NAME] = b"other"
            (tmp_path / "bucket" / NAME).write_bytes(b"other") if place == "folder" else None
        if size == 11 and disturb == "gone":
            bucket.objects.pop(NAME, None)
            (tmp_path / "bucket" / NAME).unlink() if place == "folder" else None
        grown.send(size)
        there = bucket.objects[NAME] if place == "bucket" else (tmp_path / "bucket" / NAME).read_bytes()
        assert there == path.read_bytes()
    assert list(bucket.objects) in ([NAME], [])


@pytest.mark.parametrize("fault", [503, "lost"])
@pytest.mark.parametrize("request_number", [0, 1])
def test_a_request_that_fails_is_tried_again_and_nothing_is_there_twice(
    bucket: FakeBucket, tmp_path: Path, fault: Any, request_number: int
) -> None:
    """Of the part, and of joining it."""
    path = tmp_path / "file"
    path.write_bytes(b"one\n")
    grown = GrowingObject(path, "b", NAME)
    grown.send(4)
    path.write_bytes(b"one\ntwo\n")
    bucket.faults = [None] * request_number + [fault]
    with_retries(lambda: grown.send(8), sleep=lambda _: None)
    path.write_bytes(b"one\ntwo\nthree\n")
    grown.send(14)
    assert bucket.objects[NAME] == b"one\ntwo\nthree\n"


@pytest.mark.parametrize(
    "faults", [[None, None, 503], [None, None, 404], [None, None, 403], [None, "lost", None, None, None, 503]]
)
def test_what_has_arrived_is_not_sent_again(bucket: FakeBucket, tmp_path: Path, faults: list[Any]) -> None:
    """The part cannot be deleted, or the answer of joining it was lost and the file has grown since."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    grown = GrowingObject(path, "b", NAME)
    grown.send(100_000)
    bucket.faults = [*faults]
    for size in (100_001, 100_002):
        path.write_bytes(b"x" * size)
        with suppress(TransferError):
            grown.send(size)
    with_retries(lambda: grown.send(100_002), sleep=lambda _: None)
    assert bucket.objects[NAME] == path.read_bytes()
    assert bucket.sent < 101_500, "once, and the orders to join what was new"
    assert not bucket.faults


def test_a_log_that_its_program_begins_anew_between_two_looks_is_sent_whole_at_the_end(
    bucket: FakeBucket, tmp_path: Path
) -> None:
    folder = tmp_path / "attempt-1"
    folder.mkdir()
    begun = {"bucket": "b", "log_object": NAME, "exit_object": "exit", "started": 1.0}
    write_json(folder / "pid.json", {**begun, "boot_id": "b", "program": {}, "supervisor": {}})
    grown = GrowingObject(folder / "log", "b", NAME)
    for content in (b"one\n", b"one\ntwo\n", b"ONE AND\nTWO AND\nMORE\n"):
        (folder / "log").write_bytes(content)
        grown.send(len(content))
    assert bucket.objects[NAME] != content
    finalize_attempt(folder, {"code": 0, "signal": None, "error": None, "ended": 2.0}, lambda: grown)
    assert bucket.objects[NAME] == content


def test_a_part_that_is_left_is_not_taken_for_the_file(bucket: FakeBucket, tmp_path: Path) -> None:
    path, name = tmp_path / "file", "runs/run-1/tb/events.out.tfevents.1"
    grown = GrowingObject(path, "b", name)
    bucket.faults = [None, None, None, 503]
    for content in (b"one\n", b"one\ntwo\n"):
        path.write_bytes(content)
        grown.send(len(content))
    assert bucket.objects.pop(name) == content
    [part] = bucket.objects
    assert part.startswith("runs/run-1/parts/")
    assert "tfevents" not in part


def test_what_could_not_be_sent_is_sent_the_next_time(bucket: FakeBucket, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\n")
    grown = GrowingObject(path, "b", NAME, arrived=4)
    grown.send(4)
    assert bucket.requests == [], "it is known to be there"
    path.write_bytes(b"one\ntwo\n")
    bucket.faults = [503]
    with pytest.raises(TransferError):
        grown.send(8)
    grown.send(8)
    assert bucket.objects == {NAME: b"one\ntwo\n"}

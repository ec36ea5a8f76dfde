"""The queue of a pod when clocks of its waiters are wrong: only the bucket's counts."""

from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.gcp.folder_store import FolderClient
from controller.run.launch import PodQueue
from tests.fakes.clock import ManualClock

BUCKET_TIME = "2026-01-01T00:{:02}:{:02}.000Z"


class QueueBucket(GoogleClient):
    """Places in the queue, with the times of the bucket's own clock."""

    def __init__(self) -> None:
        super().__init__(None, Clock())
        self.seconds, self.places = 0, dict[str, tuple[bytes, int]]()

    def upload(self, bucket: str, name: str, content: bytes, **_: Any) -> dict[str, Any]:
        self.places[name] = content, self.seconds
        return self.object_metadata(bucket, name)[0]

    def list_all(self, *_: Any, **__: Any) -> Any:
        return iter([{"name": name} for name in self.places])

    def download(self, bucket: str, name: str) -> bytes:
        return self.places[name][0]

    def object_metadata(self, bucket: str, name: str) -> tuple[dict[str, Any], float]:
        now = datetime.fromisoformat(BUCKET_TIME.format(*divmod(self.seconds, 60))).timestamp()
        return {"updated": BUCKET_TIME.format(*divmod(self.places[name][1], 60))}, now

    def call(self, api: str, method: str, **given: Any) -> dict[str, Any]:
        assert method == "objects.delete"
        del self.places[given["object"]]
        return {}


@pytest.mark.parametrize("off", [0.0, 3600.0, -3600.0, 1e9])
def test_a_controller_whose_clock_is_wrong_neither_jumps_nor_blocks_the_queue(off: float) -> None:
    """Ahead or behind: who came first is first, who lives stays, and who has died holds nobody up."""
    bucket = QueueBucket()
    clocks = {"first": ManualClock(start=off), "second": ManualClock(), "third": ManualClock(start=-off)}
    queues = {run: PodQueue(bucket, clock, "b", "pod") for run, clock in clocks.items()}
    with ExitStack() as waiting:
        refresh = dict[str, Any]()
        for run, queue in queues.items():
            refresh[run] = waiting.enter_context(queue.enqueued(run))
            bucket.seconds += 5
        for _ in range(10):  # the first one has died
            assert {tuple(queue.waiting_runs()) for queue in queues.values()} == {("first", "second", "third")}
            bucket.seconds += 10
            for run in ("second", "third"):
                clocks[run].elapsed += 10
                refresh[run]()
        bucket.seconds += 10
        assert {tuple(queue.waiting_runs()) for queue in queues.values()} == {("second", "third")}
    assert bucket.places == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"format": 1, "run_id": "run-1", "since": "x", "refreshed": []}', "is damaged"),
        ('{"format": 2, "run_id": "run-1"}', "has format 2"),
        ("9" * 5000, "is damaged"),
    ],
)
def test_a_place_that_cannot_be_read_is_named_and_waits_for_nothing(text: str, problem: str, tmp_path: Path) -> None:
    clock = ManualClock()
    mine = PodQueue(FolderClient(clock), clock, str(tmp_path), "pod")
    with mine.enqueued("run-1"):
        [file] = tmp_path.rglob("run-1.json")
        file.write_text(text)
        assert mine.waiting_runs() == []
    assert problem in mine.problems[0]

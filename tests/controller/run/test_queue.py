"""The queue of a pod when clocks of its waiters are wrong: only the bucket's counts."""

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from controller.gcp.folder_store import FolderClient
from controller.run.launch import QUEUE_REFRESH_SECONDS, QUEUE_STALE_SECONDS, PodQueue
from tests.fakes.clock import ManualClock

OFF = {"right": 0.0, "an hour ahead": 3600.0, "an hour behind": -3600.0, "of 1970": -time.time(), "of 2100": 2e9}


def queue(folder: Path, off: float) -> tuple[PodQueue, ManualClock]:
    clock = ManualClock(time.time() + off)
    return PodQueue(FolderClient(clock), clock, str(folder), "pod"), clock


@pytest.mark.parametrize("first", OFF)
@pytest.mark.parametrize("second", OFF)
def test_the_order_is_that_of_arrival(first: str, second: str, tmp_path: Path) -> None:
    with ExitStack() as waiting:
        for name, clock_name in (("run-b", first), ("run-a", second)):
            mine, clock = queue(tmp_path, OFF[clock_name])
            refresh = waiting.enter_context(mine.enqueued(name))
            time.sleep(0.002)
            clock.elapsed += QUEUE_REFRESH_SECONDS
            refresh()
            time.sleep(0.002)
        for off in OFF.values():
            assert queue(tmp_path, off)[0].waiting_runs() == ["run-b", "run-a"]


@pytest.mark.parametrize("clock_name", OFF)
def test_a_dead_waiter_holds_up_nobody(clock_name: str, tmp_path: Path) -> None:
    dead, _ = queue(tmp_path, OFF[clock_name])
    with dead.enqueued("run-1"):
        [file] = tmp_path.rglob("run-1.json")
        old = time.time() - QUEUE_STALE_SECONDS - 1.0
        os.utime(file, (old, old))
        for off in OFF.values():
            assert queue(tmp_path, off)[0].waiting_runs() == []


def test_a_place_of_other_types_is_damaged(tmp_path: Path) -> None:
    mine, _ = queue(tmp_path, 0.0)
    with mine.enqueued("run-1"):
        [file] = tmp_path.rglob("run-1.json")
        file.write_text('{"format": 1, "run_id": "run-1", "since": "x", "refreshed": []}')
        assert mine.waiting_runs() == []
    assert "is damaged" in mine.problems[0]

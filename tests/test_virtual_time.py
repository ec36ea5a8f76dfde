"""Hours pass for everybody who shares a time, in seconds."""

import selectors
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from controller.core.this_process import InterruptedSleepError
from tests.virtual_time import SharedTime, VirtualClock

HOUR, LONG = 3600.0, 60.0
SLEEPER = """
import asyncio, sys, time
from pathlib import Path
from tests.virtual_time import SharedTime, live_in

live_in(SharedTime(Path(sys.argv[1])))
began = time.time()

async def main():
    sleep = asyncio.create_task(asyncio.sleep(3600))
    await asyncio.sleep(0)
    print("ready", flush=True)
    await sleep

asyncio.run(main())
print(time.time() - began >= 3600)
"""


@pytest.fixture
def shared(tmp_path: Path) -> SharedTime:
    return SharedTime(tmp_path / "time")


def test_a_sleep_makes_it_later_for_every_clock(shared: SharedTime, tmp_path: Path) -> None:
    mine, theirs = VirtualClock(shared), VirtualClock(SharedTime(tmp_path / "time"))
    before = [(clock.now(), clock.monotonic(), clock.boot_time()) for clock in (mine, theirs)]
    is_late, is_too_late = theirs.deadline(LONG), theirs.deadline(HOUR)
    mine.sleep(LONG)
    for clock, times in zip((mine, theirs), before, strict=True):
        now = (clock.now(), clock.monotonic(), clock.boot_time())
        assert all(LONG - 1e-3 <= late - early < HOUR for late, early in zip(now, times, strict=True))
    assert (is_late(), is_too_late()) == (True, False)
    shared.skip_to(0.0)
    assert theirs.monotonic() >= before[1][1] + LONG, "it is never earlier again"


def test_a_wait_in_the_background_ends_with_its_event_or_when_it_is_late_enough(shared: SharedTime) -> None:
    clock, event, came = VirtualClock(shared), threading.Event(), list[bool]()
    waits = threading.Thread(target=lambda: came.append(clock.wait(event, HOUR)))
    waits.start()
    shared.skip(HOUR)
    waits.join()
    event.set()
    assert [*came, clock.wait(event, HOUR)] == [False, True]


def test_a_sleep_that_is_interrupted_ends(shared: SharedTime) -> None:
    clock = VirtualClock(shared)
    threading.Timer(0.05, clock.interrupt).start()
    with pytest.raises(InterruptedSleepError):
        clock.sleep(1e6)
    with pytest.raises(InterruptedSleepError):
        clock.sleep(0)


def test_a_request_that_waits_for_google_makes_it_later(shared: SharedTime) -> None:
    clock = VirtualClock(shared)
    asked = clock.monotonic()

    def answer() -> float:
        while clock.monotonic() < asked + LONG:
            clock.wait(threading.Event(), 1.0)
        return clock.monotonic()

    assert clock.await_answer(answer) >= asked + LONG


def test_the_event_loop_of_an_emulated_cloud_lives_in_it(shared: SharedTime, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLEEPER, str(tmp_path / "time")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        shared.skip(2 * HOUR)
        assert process.stdout.read() == "True\n"
    assert selectors.DefaultSelector.__module__ == "selectors", "this process is left alone"

"""Where time is held, it passes by request alone; what is due comes at its moment, and never while a thread works."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.localcloud import lifecycle
from controller.localcloud.clock import HeldLoop
from tests.controller.localcloud.harness import PROJECT, EmulatedCloud, run_localcloud


@pytest.fixture
def loop() -> Iterator[HeldLoop]:
    made = HeldLoop()
    yield made
    made.close()


def test_timers_come_at_their_moments_and_in_their_order(loop: HeldLoop) -> None:
    seen: list[tuple[str, float]] = []

    async def wake(name: str, seconds: float) -> None:
        began = loop.time()
        await asyncio.sleep(seconds)
        seen.append((name, round(loop.time() - began, 6)))

    async def scene() -> None:
        async with asyncio.TaskGroup() as group:
            for name, seconds in (("hour", 3600.0), ("second", 1.0), ("minute", 60.0)):
                group.create_task(wake(name, seconds))
            await loop.move_on(59.9)
            assert seen == [("second", 1.0)]
            await loop.move_on(0.1)
            await loop.move_on(3540)

    loop.run_until_complete(scene())
    assert seen == [("second", 1.0), ("minute", 60.0), ("hour", 3600.0)]


def test_no_time_passes_while_a_thread_works(loop: HeldLoop) -> None:
    async def work() -> float:
        began = loop.time()
        moving = asyncio.ensure_future(loop.move_on(600))
        await asyncio.to_thread(time.sleep, 0.05)
        taken = loop.time() - began
        await moving
        assert loop.time() - began == pytest.approx(600)
        return taken

    assert loop.run_until_complete(work()) == 0.0


@pytest.fixture
def held(tmp_path: Path) -> Iterator[EmulatedCloud]:
    cloud = EmulatedCloud(tmp_path / "state")
    done = run_localcloud("start", cloud.state, "--held", "--operation-seconds=30")
    assert done.returncode == 0, done.stderr
    yield cloud
    lifecycle.wipe(cloud.state)


@pytest.mark.e2e
def test_an_operation_ends_when_it_is_that_late(held: EmulatedCloud) -> None:
    enable = f"serviceusage/v1/{PROJECT}/services/compute.googleapis.com:enable"
    name = held.call_ok("POST", enable, {})["name"]
    assert held.call_ok("POST", "emulator/clock", {"seconds": 9.9}) == {}
    assert "done" not in held.call_ok("GET", f"serviceusage/v1/{name}"), "10 s at least"
    held.call_ok("POST", "emulator/clock", {"seconds": 18.2})
    assert held.call_ok("GET", f"serviceusage/v1/{name}")["done"]
    assert held.call_ok("GET", "emulator/delays")["enable services"] == [10, 60]
    for seconds in (-1, "1", None, True):
        held.refused("POST", "emulator/clock", {"seconds": seconds}, 400, "seconds must be a number")


@pytest.mark.e2e
def test_time_that_passes_by_itself_is_not_moved(cloud: EmulatedCloud) -> None:
    cloud.refused("POST", "emulator/clock", {"seconds": 1}, 400, "--held")

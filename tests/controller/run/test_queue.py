"""The queue of a pod: who comes first when clocks are wrong, and to whom an ending run leaves its pod."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.gcp.folder_store import FolderClient
from controller.lease import Lease, LeaseHeldError
from controller.records.ledger import Result
from controller.run.launch import QUEUE_REFRESH_SECONDS, Place, PodQueue
from tests.controller.run.queue_world import Controller, QueueBucket, World
from tests.fakes.clock import ManualClock


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What threads do is a step of the test."""
    for kind in (Place, Lease):
        monkeypatch.setattr(kind, "_watch", lambda self, stop: None)


@pytest.mark.parametrize("off", [0.0, 3600.0, -3600.0, 1e9])
def test_a_controller_whose_clock_is_wrong_neither_jumps_nor_blocks_the_queue(off: float) -> None:
    """Ahead or behind: who came first is first, who lives stays, and who has died holds nobody up."""
    bucket = QueueBucket()
    clocks = {"first": ManualClock(start=off), "second": ManualClock(), "third": ManualClock(start=-off)}
    queues = {run: PodQueue(bucket, clock, "b", "pod") for run, clock in clocks.items()}
    places = {run: queue.place(run, "1") for run, queue in queues.items()}
    for place in places.values():
        place.take()
        bucket.seconds += 5
    for _ in range(5):  # the first one has died
        assert {tuple(queue.waiting_runs()) for queue in queues.values()} == {("first", "second", "third")}
        bucket.seconds += QUEUE_REFRESH_SECONDS
        for run in ("second", "third"):
            clocks[run].elapsed += QUEUE_REFRESH_SECONDS
            places[run].refresh()
    bucket.seconds += 10
    assert {tuple(queue.waiting_runs()) for queue in queues.values()} == {("second", "third")}
    for place in places.values():
        place.leave()
        place.leave()
    assert bucket.places == {}


def test_of_two_controllers_of_a_run_one_may_leave() -> None:
    """The other one keeps the run's turn, which is that of the first."""
    bucket = QueueBucket()
    queue = PodQueue(bucket, ManualClock(), "b", "pod")
    places = [queue.place(run, controller) for run, controller in (("run-1", "1"), ("run-2", "2"), ("run-1", "3"))]
    for place in places:
        bucket.seconds += 1
        place.take()
    assert queue.waiting_runs() == ["run-1", "run-2"]
    places[2].leave()
    assert queue.waiting_runs() == ["run-1", "run-2"]
    assert queue.waiting_runs(but="run-1") == ["run-2"]


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
    place = mine.place("run-1", "1")
    place.take()
    [file] = tmp_path.rglob("run-1.1.json")
    file.write_text(text)
    assert mine.waiting_runs() == []
    assert problem in mine.problems[0]
    place.leave()


def test_a_run_that_finds_another_one_faster_is_waited_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller attaches to its run while the next one, which saw nobody drive it, takes its turn."""
    world = World(random.Random(0), monkeypatch)
    first, second = world.controllers = [Controller(world, f"run-{n}", Controller.attach) for n in (1, 2)]
    world.bucket.seconds = world.program_ends
    result = Result("run-1", "finished", 1, 0.0, 0.0, {}, "delete")

    def faster() -> int:
        first.lease.ensure()
        return second.lease.ensure()

    second.context.before_pod_write = faster
    with pytest.raises(LeaseHeldError):
        second.waiter.await_turn()
    assert not first.ending.clean_up(result)
    assert first.notes == ["the pod stays for the next run: run-2"]
    first.lease.release()
    second.context.before_pod_write = second.lease.ensure
    second.waiter.await_turn()
    first.ending._hand_over("finished", 0)
    assert (world.pod, second.lease.held) == (1, True)


def test_a_run_that_began_and_was_left_during_the_look_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has started it with `--detach`, which waits in no queue, between the look and the lease."""
    world = World(random.Random(0), monkeypatch)
    [mine] = world.controllers = [Controller(world, "run-2", Controller.attach)]
    world.bucket.seconds = world.program_ends

    def began() -> int:
        if world.program == "run-1":
            world.launch("run-3")
        return mine.lease.ensure()

    def sleep(seconds: float) -> None:
        assert not mine.lease.held, "its own controller may attach"
        world.bucket.seconds += seconds

    mine.context.before_pod_write = began
    monkeypatch.setattr(mine.context.clock, "sleep", sleep)
    mine.waiter.await_turn()
    assert mine.notes == ["waiting for run-3"]
    assert mine.lease.held
    assert not world.running()


@pytest.mark.parametrize("other", ["", "acts", "acts meanwhile", "has left its program there"])
def test_who_cleans_up_after_a_killed_controller_has_its_pod_first(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(random.Random(0), monkeypatch)
    again, second = world.controllers = [Controller(world, f"run-{n}", Controller.attach) for n in (1, 2)]
    if other == "acts":
        second.lease.ensure()
    seen = again.ending.own_pod

    def own_pod() -> Any:
        found = seen()
        if other == "acts meanwhile":
            second.lease.ensure()
        elif other == "has left its program there":
            world.launch("run-2")
        return found

    again.ending.own_pod = own_pod  # type: ignore[method-assign]
    world.bucket.seconds = world.program_ends
    assert again.ending.clean_up(Result("run-1", "finished", 1, 0.0, 0.0, {}, "delete")) == (not other)
    assert world.pod == bool(other)


@pytest.mark.parametrize("killed", ["", "run-1", "run-2", "run-3"])
def test_in_no_order_is_a_pod_lost_that_a_run_waits_for_or_left_that_none_waits_for(
    killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ends while one or two wait, in many orders; one of them is killed at some step, or leaves."""
    for seed in range(40):
        order = random.Random(seed)
        world = World(order, monkeypatch)
        leaves = order.choice([10.0**9, 10.0**9, order.uniform(1, 40)])
        acts: list[Callable[[Controller], object]] = [
            Controller.attach, Controller.queue, lambda one, leaves=leaves: one.queue(leaves)
        ][: order.choice([2, 3])]  # fmt: skip
        world.controllers = [Controller(world, f"run-{n}", act) for n, act in enumerate(acts, 1)]
        world.live(killed, order.randrange(40))
        errors = [one.error for one in world.controllers if one.error is not None]
        assert errors == [], f"seed {seed}: {errors}"
        holder = world.controllers[0].lease.read()
        if holder is None or holder.record.released:  # else one was killed that had the pod, as any controller may be
            assert world.pod == 0, f"seed {seed}: the pod is left, paid by {world.payer}"

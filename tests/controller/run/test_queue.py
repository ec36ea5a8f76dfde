"""The queue of a pod: who comes first when clocks are wrong, and to whom an ending run leaves its pod."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.gcp.folder_store import FolderClient
from controller.gcp.google_errors import ConflictError, NotFoundError
from controller.lease import Lease, LeaseHeldError, lease_guard
from controller.lease_store import BucketLeaseStore, Identity
from controller.records.ledger import Result
from controller.run import ending, launch
from controller.run.ending import Ending
from controller.run.launch import QUEUE_REFRESH_SECONDS, Place, PodQueue, QueueWaiter
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context
from tests.fakes.google import KilledError

TERM, POLL = 60.0, 5.0


class QueueBucket(GoogleClient):
    """Places in the queue and leases, with the times of its own clock, in seconds; `step` precedes each request."""

    def __init__(self, step: Callable[[str], object] = lambda request: None) -> None:
        super().__init__(None, Clock())
        self.seconds, self.places, self.step = 0.0, dict[str, tuple[bytes, float, int, Any]](), step

    def upload(
        self, bucket: str, name: str, content: bytes, *, generation: int | None = None, metadata: Any = None, **_: Any
    ) -> dict[str, Any]:
        self.step("upload")
        now = self.places[name][2] if name in self.places else 0
        if generation not in (None, now):
            raise ConflictError("insert", 412, "conditionNotMet", "another generation")
        self.places[name] = content, self.seconds, now + 1, metadata
        return self._describe(name)

    def list_all(self, *_: Any, prefix: str, **__: Any) -> Iterator[dict[str, Any]]:
        self.step("list")
        return iter([{"name": name} for name in self.places if name.startswith(prefix)])

    def download(self, bucket: str, name: str) -> bytes:
        self.step("download")
        self._describe(name)
        return self.places[name][0]

    def object_metadata(self, bucket: str, name: str) -> tuple[dict[str, Any], float]:
        self.step("get")
        return self._describe(name), self.seconds

    def _describe(self, name: str) -> dict[str, Any]:
        if name not in self.places:
            raise NotFoundError("get", 404, "notFound", name)
        _, written, generation, metadata = self.places[name]
        updated = datetime.fromtimestamp(written, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"updated": updated, "generation": str(generation), "metadata": metadata or {}}

    def call(self, api: str, method: str, **given: Any) -> dict[str, Any]:
        assert method == "objects.delete"
        self.step("delete")
        self._describe(given["object"])
        del self.places[given["object"]]
        return {}


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


class World:
    """One pod, and controllers each of which does one request at a time, in an order that a seed gives.

    Attributes:
        pod: 1 if it exists, else 0. `payer`: the run that is billed for it.
        program: the run whose program is on it until `program_ends`, whether its controller lives or not.
        wanted_by: the live runs that waited for it when a run looked for the last time, by that run.
    """

    def __init__(self, order: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order, self.bucket = order, QueueBucket(self.step)
        self.controllers = list[Controller]()
        self.pod, self.payer, self.program, self.program_ends = 1, "run-1", "run-1", POLL
        self.wanted_by = dict[str, set[str]]()
        self._turn, self._renewed = threading.Semaphore(0), 0.0
        self.node = SimpleNamespace(
            name="pod", adopt=False, is_ready=True, accepts_our_key=lambda _: True, fleet=lambda _: None
        )
        monkeypatch.setattr(launch, "Node", SimpleNamespace)
        monkeypatch.setattr(launch, "running_runs", lambda _: self.running())
        monkeypatch.setattr(ending, "destroy", self.destroy)
        monkeypatch.setattr(ending, "replace", lambda node, **_: node)

    @property
    def here(self) -> "Controller | None":
        return next((one for one in self.controllers if one.thread is threading.current_thread()), None)

    def step(self, request: str) -> None:
        """Let others go first; a controller that was killed gets no further."""
        if (one := self.here) is None:
            return
        self._turn.release()
        one.turn.acquire()
        if one.is_killed:
            raise KilledError
        if request == "list":
            self.wanted_by[one.run] = self.waiting() - {one.run}

    def running(self) -> set[str]:
        return {self.program} if self.bucket.seconds < self.program_ends else set()

    def launch(self, run: str) -> None:
        assert self.running() <= {run}, "two use the pod"
        self.pod, self.payer, self.program, self.program_ends = 1, run, run, self.bucket.seconds + 2 * POLL

    def waiting(self) -> set[str]:
        return {one.run for one in self.controllers if one.waits and not one.is_killed}

    def destroy(self, *_: object) -> None:
        if (one := self.here) is not None:
            one.lease.ensure()
            assert self.wanted_by[one.run] & self.waiting() == set(), f"{one.run} deletes the pod that others wait for"
        self.pod = 0

    def live(self, kill: str = "", after: int = 0) -> None:
        """Live until all have ended; one of them is killed after so many steps of its own."""
        for one in self.controllers:
            one.thread.start()
            self._turn.acquire()
        for _ in range(3000):
            alive = [one for one in self.controllers if one.thread.is_alive() and not one.has_ended]
            if not alive:
                return
            ready = [one for one in alive if one.wakes <= self.bucket.seconds]
            if not ready:
                self.bucket.seconds = min(one.wakes for one in alive)
                continue
            self._in_background()
            one = self.order.choice(ready)
            one.steps += 1
            one.is_killed = one.is_killed or (one.run == kill and one.steps > after)
            self.bucket.seconds += 0.1
            one.turn.release()
            self._turn.acquire()
        raise AssertionError(f"they wait for ever: {[one.run for one in self.controllers if not one.has_ended]}")

    def _in_background(self) -> None:
        if self.bucket.seconds < self._renewed + 10:
            return
        self._renewed = self.bucket.seconds
        for one in self.controllers:
            if one.thread.is_alive() and not one.is_killed:
                if one.place._stop is not None:
                    one.place.refresh()
                if one.lease.held and not one.lease._stop.is_set() and one.lease._lock.acquire(blocking=False):
                    one.lease._renew()
                    one.lease._lock.release()


class VirtualClock(Clock):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def now(self) -> float:
        return self._world.bucket.seconds

    monotonic = boot_time = now

    def sleep(self, seconds: float) -> None:
        one = self._world.here
        assert one is not None
        one.wakes = self._world.bucket.seconds + seconds
        self._world.step("sleep")


class Controller:
    """As much of a RunDriver as waits for a pod, uses it and ends it."""

    def __init__(self, world: World, run: str, act: Callable[["Controller"], object]) -> None:
        self.world, self.run, self.notes = world, run, list[str]()
        self.turn, self.wakes, self.steps = threading.Semaphore(0), 0.0, 0
        self.is_killed = self.has_ended = self.waits = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._live, args=(act,), daemon=True)
        clock, me = VirtualClock(world), Identity("laptop", run, id=run, process="")
        self.context = make_context(world.bucket, clock=clock, notes=self.notes)
        self.lease = Lease(BucketLeaseStore(world.bucket, "b", "pod"), clock, me, TERM, 10.0, lambda: None)
        config = SimpleNamespace(checkpoint=SimpleNamespace(max_outage_hours=1.0))
        self.plan: Any = SimpleNamespace(
            run_id=run, bucket="b", node=world.node, config=config, observe_pod=lambda _: world.pod and world.node
        )
        self.waiter = QueueWaiter(self.plan, self.context, self.lease, POLL, self.notes.append)
        self.place = self.waiter._place
        none: Any = None
        spending: Any = SimpleNamespace(reload=lambda: None, close_billing=lambda _: None)
        self.ending = Ending(self.plan, self.context, none, spending, self.waiter, self.lease, self.lease.ensure)
        self.ending.own_pod = lambda: world.node if world.pod and world.payer == run else None  # type: ignore[method-assign]

    def _live(self, act: Callable[["Controller"], object]) -> None:
        try:
            self.world.step("begin")
            act(self)
        except KilledError:
            self.is_killed = True
        except BaseException as error:
            self.error = error
        self.has_ended = True
        self.world._turn.release()

    def attach(self) -> None:
        """Attach to a program, which ends before this controller has the lease; a run that waits may be faster."""
        self.context.clock.sleep(self.world.order.uniform(POLL, 3 * POLL))
        with suppress(LeaseHeldError), lease_guard(self.lease, self.plan, self.context):
            self.lease.ensure()
            self._clean_up()
        self.ending._hand_over("finished", 0)

    def queue(self, leaves_after: float = 10.0**9) -> None:
        """Wait for the pod, and use it; leave the queue at some time instead."""
        late = self.context.clock.deadline(leaves_after)
        with lease_guard(self.lease, self.plan, self.context):
            while not self.lease.held:
                try:
                    self._await_turn(late)
                except LeaseHeldError:
                    self.context.clock.sleep(POLL)
                except TimeoutError:
                    self.waits = False
                    self.waiter.leave()
                    return
            self.world.launch(self.run)
            self.waits = False
            self.waiter.leave()
            self.context.clock.sleep(2 * POLL)
            assert self.world.program == self.run, "two use the pod"
            self._clean_up()
        self.ending._hand_over("finished", 0)

    def _await_turn(self, late: Callable[[], bool]) -> None:
        take, sleep = self.place.take, self.context.clock.sleep

        def taken() -> None:
            take()
            self.waits = True

        def look(seconds: float) -> None:
            sleep(seconds)
            if late():
                raise TimeoutError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.place, "take", taken)
            patch.setattr(self.context.clock, "sleep", look)
            self.waiter.await_turn()

    def _clean_up(self) -> None:
        self.ending.clean_up(Result(self.run, "finished", 1, 0.0, 0.0, {}, "delete"))
        self.lease.release("finished", 0)


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

"""A world of controllers that want one pod: their bucket, clock and steps, in an order that a test sets."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ConflictError, NotFoundError
from controller.lease import Lease, LeaseHeldError, lease_guard
from controller.lease_store import BucketLeaseStore, Identity
from controller.records.ledger import Result
from controller.run import ending, launch
from controller.run.ending import Ending
from controller.run.launch import QueueWaiter
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

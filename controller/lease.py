"""Lease that lets one controller at a time act on a pod or a run: acquired before the first write, renewed, checked.

A holder trusts its lease for slightly less than the term after its last write, measured on a clock that nobody can set.
Another controller may take the lease only when the server says that the whole term has passed. The two therefore never
overlap, however far their clocks differ. A controller that was stopped, asleep or offline for longer finds out before
its next write: it asks for the lease again and, if another controller holds it, is fenced and ends. A late request to a
worker is refused there because its token is smaller (controller/agent/dispatch.py).

Whoever wants a lease released writes that into an object beside it, which a controller reads from its beginning on.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from controller.context import Context
from controller.core.errors import LeaseLostError, SlipwayError
from controller.core.this_process import Clock, InterruptedSleepError
from controller.gcp.google_errors import ConflictError, NotFoundError
from controller.lease_store import (
    BucketLeaseStore,
    DamagedLeaseError,
    Identity,
    LeaseRecord,
    LeaseSnapshot,
    ReleaseRequest,
)
from controller.plan.build import Plan

SAFETY_MARGIN = 1 / 6
"""Fraction of the term: a holder stops trusting its lease this long before the end, so that a started write arrives."""
RUN_ENDING_REASONS = ("cancelled", "deleted", "stopped")
"""Prefixes of release requests that end the run; after any other request, the new holder continues the run."""
REQUEST_SECONDS = 3.0
"""Interval at which a controller looks for a request to release the lease."""
RENEW_SECONDS = 10.0
RENEWALS_PER_TERM = 4
"""Minimum number of renewals per term. The shortest term, of 15 s, leaves more than WRITE_SECONDS between them."""
WRITE_SECONDS = 1.0
"""Between two writes of one object: https://cloud.google.com/storage/quotas#objects."""
ASK_AGAIN_SECONDS = 10.0
"""After which a holder is asked again: somebody else may have overwritten the request."""


class LeaseHeldError(SlipwayError):
    """Another controller holds the lease; nothing was done."""

    exit_code = 2

    def __init__(self, snapshot: LeaseSnapshot, what: str) -> None:
        self.snapshot = snapshot
        super().__init__(f"{snapshot.record} controls this {what}")


class ReleaseRequestedError(LeaseLostError):
    """The controller was asked to release the lease and did. `ends_run` is true if the request also ends the run."""

    def __init__(self, asked: str) -> None:
        self.asked, self.ends_run = asked, asked.startswith(RUN_ENDING_REASONS)
        again = "cancelled; run the same command to resume from the last checkpoint"
        what = again if self.ends_run else "this controller released the lease and changes nothing more"
        super().__init__(f"{asked}: {what}")


class Lease:
    """Lease of one pod, run or sweep, from the point of view of one controller. Thread-safe."""

    def __init__(
        self,
        file: BucketLeaseStore,
        clock: Clock,
        me: Identity,
        seconds: float,
        every: float,
        fenced: Callable[[], None],
        *,
        what: str = "pod",
        first: "Lease | None" = None,
    ) -> None:
        """Prepare the lease without acquiring it.

        Args:
            file: where the lease is stored.
            clock: measures the term.
            me: this controller.
            seconds: the term.
            every: the lease is renewed every so many seconds, or more often.
            fenced: called once, from any thread, when another controller takes over; should wake up threads that sleep.
            what: what the lease is of, for messages.
            first: lease that is acquired before this one and released with it: whoever loses one has lost both.
        """
        self._what, self._first = what, first
        self._store, self._clock, self.identity, self._seconds = file, clock, me, seconds
        self._renew_seconds, self._on_lost = min(every, seconds / RENEWALS_PER_TERM), fenced
        self._record: LeaseRecord | None = None
        self._generation = 0
        self._valid_until = 0.0
        self._lost_error: LeaseLostError | None = None
        self._problems: list[str] = []
        self._lock = threading.RLock()
        self._began, self._drives = clock.boot_time(), False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> bool:
        return self._record is not None

    @property
    def last_token(self) -> int:
        """Token of the lease that we hold, or held as far as we know; 0 if we never did."""
        return self._record.token if self._record is not None else 0

    @property
    def problems(self) -> list[str]:
        """What somebody else did to the stored lease while we held it, and also to the one acquired before it."""
        return [*(self._first.problems if self._first is not None else ()), *self._problems]

    def current_other(self) -> LeaseSnapshot | None:
        """Return the lease if another controller holds it, None if it is free or ours."""
        return snapshot if self.is_held_by_other(snapshot := self._store.read()) else None

    def is_held_by_other(self, snapshot: LeaseSnapshot | None) -> bool:
        """Return whether `snapshot` shows that another controller holds the lease."""
        if snapshot is None or snapshot.record.id == self.identity.id:
            return False
        return not snapshot.is_free(self.identity.is_known_dead(snapshot.record))

    def read(self) -> LeaseSnapshot | None:
        """Return the stored lease, whichever controller wrote it."""
        return self._store.read()

    def ensure(self) -> int:
        """Acquire or confirm the lease before a write; return its token. No request while it is known to be valid.

        Raises:
            LeaseHeldError: another controller holds it, and this one never did.
            LeaseLostError: this controller held it and lost it for good: taken by another one, or released on request.
            GoogleError: the state of the lease cannot be read.
        """
        self.raise_if_lost()
        if self._first is not None:
            self._first.ensure()
        if (mine := self._record) is not None and self._clock.boot_time() < self._valid_until:
            return mine.token  # without the lock, which a slow renewal may hold
        with self._lock:
            self.raise_if_lost()
            if self._record is None:
                self._acquire()
            elif self._clock.boot_time() >= self._valid_until:
                self._renew()
                self.obey_requests()
            assert self._record is not None
            return self._record.token

    def listen(self) -> None:
        """Obey requests from now on until `release`, before the lease is held as well, those to all included.

        For a controller that drives a run or a sweep, and not for one that ends them.
        """
        if self._first is not None:
            self._first.listen()
        self._drives = True
        self._start_watch()

    def check(self) -> None:
        """Confirm the lease if this controller holds it, else look whether another one does; acquires nothing.

        For an act that must not write, such as attaching to a run that continues by itself. Raises as `ensure` does.
        """
        if self._first is not None:
            self._first.check()
        if self.held:
            self.ensure()
        elif (other := self.current_other()) is not None:
            raise LeaseHeldError(other, self._what)

    def raise_if_lost(self) -> None:
        """Raise LeaseLostError if the loss is already known; sends no request."""
        if self._lost_error is not None:
            raise self._lost_error
        if self._first is not None:
            self._first.raise_if_lost()

    def take_over(self, why: str, tell: Callable[[str], object] = lambda message: None) -> None:
        """Acquire the lease once its holder, asked to, releases it or its term is over. LeaseHeldError: another did."""
        asked = self.await_release(why, tell)
        while True:
            try:
                self.ensure()
                return
            except LeaseHeldError as held:
                if asked is None or not asked.has_holder_of(held.snapshot.record):
                    raise
                self._clock.sleep(min(1.0, self._renew_seconds / 2))  # it releases the first one after this one

    def await_release(self, why: str, tell: Callable[[str], object] = lambda message: None) -> LeaseRecord | None:
        """Ask the holder to release the lease, wait until it has, or its term is over, and return what it held."""
        if (asked := self.request_release(why)) is None:
            return None
        tell(f"waiting for {asked} to release the lease")
        again = self._clock.deadline(ASK_AGAIN_SECONDS)
        while (snapshot := self.current_other()) and snapshot.record.id == asked.id:
            if again():
                self.request_release(why)
                again = self._clock.deadline(ASK_AGAIN_SECONDS)
            self._clock.sleep(min(1.0, self._renew_seconds / 2))
        return asked

    def request_release(self, why: str) -> LeaseRecord | None:
        """Ask the holder to release the lease; return its record, or None if nobody holds it."""
        if (snapshot := self.current_other()) is None:
            return None
        self._request(why, snapshot.record.id)
        return snapshot.record

    def request_from_all(self, why: str) -> bool:
        """Ask each controller that has begun, and may not hold the lease yet, to end; return False without a bucket."""
        if not self._store.has_bucket():
            return False
        self._request(why, "")
        return True

    def _request(self, why: str, holder_id: str) -> None:
        self._store.write_request(ReleaseRequest(f"{why} by {self.identity.holder}", self.identity.id, holder_id))

    def release(self, said: str = "", exit_code: int | None = None) -> None:
        """Release the lease, with a final message if the work has ended. A lease that no longer exists is no error."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            asked = self._lost_error.asked if isinstance(self._lost_error, ReleaseRequestedError) else ""
            if self._record is not None and (self._lost_error is None or asked):
                self._write_last(replace(self._record, asked=asked, released=True, said=said, exit_code=exit_code))
        self._record = self._thread = None
        self._stop = threading.Event()
        if self._first is not None:
            self._first.release(said, exit_code)

    def _write_last(self, last: LeaseRecord) -> None:
        """Write the lease for the last time, also over what somebody has made of it; else it expires with its term."""
        with contextlib.suppress(SlipwayError, InterruptedSleepError):
            try:
                self._store.write(last, self._generation)
            except InterruptedSleepError:  # the bucket takes the next write in a second, and our clock waits no more
                self._clock.wait(threading.Event(), WRITE_SECONDS)
                self._store.write(last, self._generation)
            except ConflictError:
                try:
                    self._store.read()
                except DamagedLeaseError as damaged:
                    if self._clock.boot_time() < self._valid_until:  # nobody else can have acquired it
                        self._store.write(last, damaged.generation)

    @contextlib.contextmanager
    def released_on_exit(self) -> Iterator[None]:
        """Release the lease when the context ends, for whatever reason; a driver's error is its final message."""
        try:
            yield
        except ReleaseRequestedError as error:
            self.release(str(error), 0 if error.ends_run else None)
            raise
        except SlipwayError as error:
            self.release(str(error) if self._drives else "", error.exit_code if self._drives else None)
            raise
        except BaseException:
            self.release()
            raise
        self.release()

    def _acquire(self) -> None:
        while True:
            began = self._clock.boot_time()
            snapshot = self._store.read()
            if snapshot is not None and self.is_held_by_other(snapshot):
                raise LeaseHeldError(snapshot, self._what)
            token, generation = (snapshot.record.token + 1, snapshot.generation) if snapshot else (1, 0)
            try:
                self._write(self.identity.new_record(token, self._clock.now(), self._seconds), generation, began)
            except ConflictError:
                continue  # another controller was faster, or our own request arrived twice
            self._start_watch()
            self.obey_requests()
            return

    def _start_watch(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, args=(self._stop,), daemon=True, name="lease")
                self._thread.start()

    def obey_requests(self) -> None:
        """Give up the lease if another controller asks for that. Raises ReleaseRequestedError."""
        if (found := self._store.read_request()) is not None:
            request, age = found
            if request.is_for(self.identity.id, age, self._clock.boot_time() - self._began if self._drives else 0.0):
                raise self._mark_lost(ReleaseRequestedError(request.asked))

    def _renew(self) -> None:
        assert self._record is not None
        while True:
            began = self._clock.boot_time()
            try:
                return self._write(self._record, self._generation, began)
            except (ConflictError, NotFoundError) as error:
                there = error
            try:
                snapshot = self._store.read()
            except DamagedLeaseError as damaged:
                if began >= self._valid_until:
                    raise
                self._restore("overwritten", damaged.generation)
                continue
            if snapshot is None and isinstance(there, ConflictError) and began < self._valid_until:
                self._restore("deleted", 0)
                continue
            if snapshot is None:
                raise self._mark_lost(LeaseLostError(self._told_without_bucket()))
            if (snapshot.record.id, snapshot.record.token) != (self._record.id, self._record.token):
                message = "took over; this controller stopped and changes nothing more"
                raise self._mark_lost(LeaseLostError(f"{snapshot.record} {message}"))
            self._generation = snapshot.generation  # our own request arrived, but its response was lost

    def _told_without_bucket(self) -> str:
        """Say what goes on, and is billed, now that nothing in the bucket says so any more."""
        stopped = "the lease and its bucket no longer exist; this controller stopped"
        if not (pod := self.identity.pod):
            return f"{stopped}. Its pods and their programs go on: `slipway orphans` lists what is billed"
        return f"{stopped}. Pod {pod} and its program go on, billed if it is a cloud's, until `slipway down` deletes it"

    def _restore(self, what: str, generation: int) -> None:
        """Prepare to write the lease again in place of this generation.

        While our term lasts, nobody else can have acquired it, and of two writers one loses.
        """
        self._problems.append(f"the lease of the {self._what} was {what}; it is written again")
        self._generation = generation

    def _mark_lost(self, error: LeaseLostError) -> LeaseLostError:
        self._lost_error = error
        self._on_lost()
        return error

    def _write(self, term: LeaseRecord, generation: int, began: float) -> None:
        self._generation = self._store.write(term, generation)
        self._record, self._valid_until = term, began + self._seconds * (1 - SAFETY_MARGIN)

    def _watch(self, stop: threading.Event) -> None:
        """Renew the lease and obey requests until it is released or lost; after an error, at the next turn again."""
        renewed = self._clock.boot_time()
        while not self._clock.wait(stop, min(REQUEST_SECONDS, self._renew_seconds)):
            with self._lock:
                if stop.is_set() or self._lost_error is not None:
                    return
                try:
                    now = self._clock.boot_time()
                    if self._record is not None and now >= renewed + self._renew_seconds:
                        self._renew()
                        renewed = now
                    self.obey_requests()
                except (LeaseLostError, InterruptedSleepError):
                    return
                except SlipwayError:
                    continue  # the next write raises it, unless it is transient


def pod_lease(plan: Plan, context: Context, driver: str = "laptop", run: Lease | None = None) -> Lease:
    """Return the lease of the plan's pod, not acquired yet; `run` is that of the run, if the holder is to drive it."""
    file = BucketLeaseStore(context.google, plan.bucket, plan.node.name)
    me, seconds = Identity(driver, plan.run_id, pod=plan.node.name), plan.config.recovery.lease_duration_seconds
    return Lease(file, context.clock, me, seconds, RENEW_SECONDS, context.clock.interrupt, first=run)


def run_lease(plan: Plan, context: Context, driver: str = "laptop") -> Lease:
    """Return the lease of the plan's run, not acquired yet: one controller drives a run, on one pod."""
    file = BucketLeaseStore(context.google, plan.bucket, plan.run_id, "runs")
    me, seconds = Identity(driver, plan.run_id, pod=plan.node.name), plan.config.recovery.lease_duration_seconds
    return Lease(file, context.clock, me, seconds, RENEW_SECONDS, context.clock.interrupt, what="run")


def sweep_lease(context: Context, bucket: str, sweep_id: str, seconds: float) -> Lease:
    """Return the lease of a sweep, not acquired yet; its holder assigns runs to pods. `seconds` is the term."""
    file, me = BucketLeaseStore(context.google, bucket, sweep_id, "sweeps"), Identity("laptop", sweep_id)
    return Lease(file, context.clock, me, seconds, RENEW_SECONDS, lambda: None, what="sweep")


@contextlib.contextmanager
def lease_guard(lease: Lease, plan: Plan, context: Context) -> Iterator[None]:
    """Make every write to the pod acquire or confirm the lease while the context is open, then release the lease."""
    context.lease_path = f"{plan.bucket}/{plan.node.name}"
    context.before_pod_write = context.google.before_pod_write = lease.ensure
    try:
        with lease.released_on_exit():
            yield
    finally:
        context.before_pod_write = context.google.before_pod_write = lambda: 0

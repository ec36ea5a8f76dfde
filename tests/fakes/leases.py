"""Leases in a file that is scripted, on clocks that may be off."""

from collections.abc import Callable

from controller.core.this_process import Clock
from controller.gcp.google_errors import ConflictError, GoogleError
from controller.lease import Lease
from controller.lease_store import Identity, LeaseRecord, LeaseSnapshot, ReleaseRequest
from tests.fakes.clock import ManualClock

TERM = 60.0


class Skewed(ManualClock):
    """The clock of a machine whose date is off, as somebody set it; its stopwatch is not."""

    def __init__(self, true: ManualClock, off: float) -> None:
        super().__init__()
        self._true, self._off = true, off

    def now(self) -> float:
        return self._true.elapsed + self._off

    def boot_time(self) -> float:
        return self._true.elapsed + 1000 * self._off


class FakeFile:
    """The object in a bucket. `lose_answer`: the next write arrives, and its answer does not; `down`: nothing does.

    `attempts` to write include those that do not arrive.
    """

    def __init__(self, time: ManualClock) -> None:
        self.time = time
        self._term: LeaseRecord | None = None
        self._generation = 0
        self._updated = 0.0
        self.writes = self.attempts = 0
        self.lose_answer = self.down = False
        self._request: tuple[ReleaseRequest, float] | None = None

    def read_request(self) -> tuple[ReleaseRequest, float] | None:
        if self.down:
            raise GoogleError("get", 503, "UNREACHABLE", "no network")
        return self._request and (self._request[0], float(int(self.time.elapsed)) - self._request[1])

    def has_bucket(self) -> bool:
        return True

    def write_request(self, request: ReleaseRequest) -> None:
        self._request = request, self.time.elapsed

    def read(self) -> LeaseSnapshot | None:
        if self.down:
            raise GoogleError("get", 503, "UNREACHABLE", "no network")
        age = float(int(self.time.elapsed)) - self._updated
        return None if self._term is None else LeaseSnapshot(self._term, self._generation, age)

    def write(self, term: LeaseRecord, generation: int) -> int:
        self.attempts += 1
        if self.down:
            raise GoogleError("insert", 503, "UNREACHABLE", "no network")
        if generation != self._generation:
            raise ConflictError("insert", 412, "conditionNotMet", "another generation")
        self._term, self._generation, self._updated = term, self._generation + 1, self.time.elapsed
        self.writes += 1
        if self.lose_answer:
            self.lose_answer = False
            return self.write(term, generation)  # as the client does when it hears nothing
        return self._generation


def lease(
    file: FakeFile,
    name: str = "me",
    fenced: Callable[[], None] = lambda: None,
    first: Lease | None = None,
    what: str = "pod",
    clock: ManualClock | None = None,
    renews: bool = False,
) -> Lease:
    """Return a lease whose renewals are steps of the test, unless it `renews` in its thread."""
    me = Identity("laptop", "run-1", id=name, holder=f"{name}@host", process="")
    seconds = 0.002 if renews else 3600.0
    made = Lease(file, clock or (Clock() if renews else file.time), me, TERM, seconds, fenced, what=what, first=first)
    if not renews:
        made._watch = lambda stop: None  # type: ignore[method-assign]
    return made


def last_words(file: FakeFile) -> LeaseRecord:
    snapshot = file.read()
    assert snapshot is not None
    return snapshot.record

"""The lease's background renewal, in its real thread; and what a holder leaves behind when it stops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import LeaseLostError
from controller.gcp.errors import GoogleError
from controller.lease.lease import RENEWALS_PER_TERM, Lease, LeaseHeldError, ReleaseRequestedError, lease_guard
from controller.lease.store import Identity, LeaseRecord
from tests.controller.lease.test_lease import TERM, FakeFile, Time
from tests.controller.localcloud.harness import wait_for


class Counted(FakeFile):
    """Counts the attempts to write, with those that do not arrive."""

    attempts = 0

    def write(self, term: LeaseRecord, generation: int) -> int:
        self.attempts += 1
        return super().write(term, generation)


def renewing(file: FakeFile, clock: Time, name: str = "me", fenced: Callable[[], None] = lambda: None) -> Lease:
    me = Identity("laptop", "run-1", id=name, holder=f"{name}@host", process="")
    return Lease(file, clock, me, TERM, 0.002, fenced)


def is_renewed(file: Counted) -> bool:
    before = file.writes
    wait_for(lambda: file.writes >= before + 3, "renewals")
    return True


def test_a_lease_is_renewed_until_it_is_released() -> None:
    time = Time()
    file = Counted(time)
    mine = renewing(file, time)
    assert not mine.held
    assert mine.ensure() == 1
    assert mine.held
    assert is_renewed(file)
    thread = cast(threading.Thread, mine._thread)
    mine.release("done", 0)
    assert not thread.is_alive()
    assert not mine.held
    last = mine.read()
    assert last is not None
    assert (last.record.released, last.record.said) == (True, "done")
    assert mine.ensure() == 2, "it may be acquired again"
    assert is_renewed(file)
    mine.release()


def test_an_outage_does_not_end_the_renewals() -> None:
    time = Time()
    file = Counted(time)
    mine = renewing(file, time)
    mine.ensure()
    file.down = True
    before = file.attempts
    wait_for(lambda: file.attempts >= before + 3, "renewals in vain")
    file.down = False
    assert is_renewed(file)
    mine.release()


def test_a_renewal_that_meets_a_request_to_release_wakes_who_sleeps_and_ends() -> None:
    time, woken = Time(), threading.Event()
    file = Counted(time)
    first, second = renewing(file, time, "anna", woken.set), renewing(file, time, "ben")
    first.ensure()
    thread = cast(threading.Thread, first._thread)
    while second.request_release("cancelled") is None:
        pass
    assert woken.wait(120)
    thread.join(120)
    assert not thread.is_alive()
    with pytest.raises(ReleaseRequestedError):
        first.ensure()
    with pytest.raises(ReleaseRequestedError):
        first.raise_if_lost()
    first.release()


def test_who_takes_over_holds_the_lease() -> None:
    time = Time()
    file = Counted(time)
    mine = renewing(file, time, "ben")
    mine.take_over("taken over")
    assert mine.held
    snapshot = mine.read()
    assert snapshot is not None
    assert snapshot.record.id == "ben"
    with pytest.raises(LeaseHeldError):
        renewing(file, time, "anna").ensure()
    mine.release()


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), KeyboardInterrupt(), LeaseLostError("gone")])
def test_whatever_ends_the_work_releases_the_lease_and_is_raised(error: BaseException) -> None:
    time = Time()
    file = Counted(time)
    mine = renewing(file, time)
    mine.ensure()
    with pytest.raises(type(error)), mine.released_on_exit():
        raise error
    snapshot = mine.read()
    assert snapshot is not None
    assert snapshot.record.released
    assert not mine.held


def test_writes_to_the_pod_are_guarded_inside_the_block_only() -> None:
    time = Time()
    mine = renewing(Counted(time), time)
    google = SimpleNamespace(before_pod_write=lambda: 0)
    context: Any = SimpleNamespace(google=google, before_pod_write=lambda: 0, lease_path="")
    plan: Any = SimpleNamespace(bucket="b", node=SimpleNamespace(name="pod"))
    with lease_guard(mine, plan, context):
        assert context.lease_path == "b/pod"
        assert (context.before_pod_write(), google.before_pod_write()) == (1, 1)
    assert (context.before_pod_write(), google.before_pod_write()) == (0, 0)
    assert not mine.held


def test_several_renewals_fit_into_a_term() -> None:
    time = Time()
    me = Identity("laptop", "run-1", id="me", holder="me@host", process="")
    assert Lease(FakeFile(time), time, me, 60.0, 10.0, lambda: None)._renew_seconds == 10.0
    assert Lease(FakeFile(time), time, me, 20.0, 10.0, lambda: None)._renew_seconds == 20.0 / RENEWALS_PER_TERM
    assert RENEWALS_PER_TERM > 2


def test_a_lease_that_cannot_be_released_expires_by_itself() -> None:
    time = Time()
    file = Counted(time)
    mine = renewing(file, time)
    mine.ensure()
    file.down = True
    mine.release()
    with pytest.raises(GoogleError):
        mine.read()
    assert not mine.held

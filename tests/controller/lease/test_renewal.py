"""The lease's background renewal, in its real thread; and what a holder leaves behind when it stops."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.gcp.errors import GoogleError
from controller.lease.lease import RENEWALS_PER_TERM, Lease, ReleaseRequestedError, lease_guard
from controller.lease.store import Identity
from tests.controller.lease.test_lease import FakeFile, file, last_words, lease, time
from tests.controller.localcloud.harness import wait_for
from tests.fakes.clock import ManualClock

__all__ = ["file", "time"]


def is_renewed(file: FakeFile) -> bool:
    before = file.writes
    wait_for(lambda: file.writes >= before + 3, "renewals")
    return True


def test_a_lease_is_renewed_until_it_is_released(file: FakeFile) -> None:
    mine = lease(file, renews=True)
    assert not mine.held
    assert mine.ensure() == 1
    assert mine.held
    assert is_renewed(file)
    thread = cast(threading.Thread, mine._thread)
    mine.release("done", 0)
    assert not thread.is_alive()
    assert not mine.held
    assert (last_words(file).released, last_words(file).said) == (True, "done")
    assert mine.ensure() == 2, "it may be acquired again"
    assert is_renewed(file)
    mine.release()


def test_an_outage_does_not_end_the_renewals(file: FakeFile) -> None:
    mine = lease(file, renews=True)
    mine.ensure()
    file.down = True
    before = file.attempts
    wait_for(lambda: file.attempts >= before + 3, "renewals in vain")
    file.down = False
    assert is_renewed(file)
    mine.release()


def test_a_renewal_that_meets_a_request_to_release_wakes_who_sleeps_and_ends(file: FakeFile) -> None:
    woken = threading.Event()
    first, second = lease(file, "anna", woken.set, renews=True), lease(file, "ben", renews=True)
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


def test_writes_to_the_pod_are_guarded_inside_the_block_only(file: FakeFile) -> None:
    mine = lease(file, renews=True)
    google = SimpleNamespace(before_pod_write=lambda: 0)
    context: Any = SimpleNamespace(google=google, before_pod_write=lambda: 0, lease_path="")
    plan: Any = SimpleNamespace(bucket="b", node=SimpleNamespace(name="pod"))
    with lease_guard(mine, plan, context):
        assert context.lease_path == "b/pod"
        assert (context.before_pod_write(), google.before_pod_write()) == (1, 1)
    assert (context.before_pod_write(), google.before_pod_write()) == (0, 0)
    assert not mine.held


def test_several_renewals_fit_into_a_term(time: ManualClock, file: FakeFile) -> None:
    me = Identity("laptop", "run-1", id="me", holder="me@host", process="")
    assert Lease(file, time, me, 60.0, 10.0, lambda: None)._renew_seconds == 10.0
    assert Lease(file, time, me, 20.0, 10.0, lambda: None)._renew_seconds == 20.0 / RENEWALS_PER_TERM
    assert RENEWALS_PER_TERM > 2


def test_a_lease_that_cannot_be_released_expires_by_itself(file: FakeFile) -> None:
    mine = lease(file, renews=True)
    mine.ensure()
    file.down = True
    mine.release()
    with pytest.raises(GoogleError):
        mine.read()
    assert not mine.held

"""Verbs that end a run find its controller on this machine also where it has no lease, and no bucket, yet."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.errors import CloudError, LeaseLostError
from controller.lease import REQUEST_SECONDS
from controller.run.driven_here import PATIENCE_SECONDS, driven_here, end_starting, is_driven_here
from tests.fakes.clock import ManualClock
from tests.fakes.leases import FakeFile, lease


def test_a_run_is_driven_while_any_controller_drives_it(tmp_path: Path) -> None:
    lock = tmp_path / "runs" / "run-1" / "driven.lock"
    assert not is_driven_here(lock)
    with driven_here(lock):
        with driven_here(lock):  # one acts, one watches
            assert is_driven_here(lock)
        assert is_driven_here(lock)
        assert not is_driven_here(tmp_path / "another.lock")
    assert not is_driven_here(lock)


def test_a_state_folder_that_takes_no_lock_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("no folder")
    with driven_here(tmp_path / "runs" / "driven.lock"):
        assert not is_driven_here(tmp_path / "runs" / "driven.lock")


@pytest.mark.parametrize("bucket_after", [0.0, 4.0])
def test_a_controller_without_a_lease_is_asked_as_soon_as_there_is_a_bucket_and_awaited(
    tmp_path: Path, bucket_after: float
) -> None:
    clock, told = ManualClock(), list[str]()
    file = FakeFile(clock)
    file.has_bucket = lambda: clock.elapsed >= bucket_after  # type: ignore[method-assign]
    events = SimpleNamespace(note=lambda subject, message: told.append(message))
    context: Any = SimpleNamespace(clock=clock, events=events, poll_seconds=5.0)
    starting, asks = lease(file, "anna"), lease(file, "down")
    starting.listen()
    with ExitStack() as driving:
        driving.enter_context(driven_here(tmp_path / "lock"))

        def look() -> None:
            if file.read_request() is not None:
                try:
                    starting.obey_requests()
                except LeaseLostError:
                    driving.close()

        clock.on_sleep = look
        assert end_starting(context, asks, tmp_path / "lock", "run-1", "deleted")
    assert told == ["a controller on this machine is starting run-1; waiting for its end"]
    assert bucket_after <= clock.elapsed <= bucket_after + 2 * REQUEST_SECONDS
    assert not end_starting(context, asks, tmp_path / "lock", "run-1", "deleted")


def test_one_that_does_not_end_is_named(tmp_path: Path) -> None:
    """It waits for an answer of its user, say, and not for the clock."""
    clock = ManualClock()
    context: Any = SimpleNamespace(clock=clock, events=SimpleNamespace(note=lambda *_: None), poll_seconds=5.0)
    file = FakeFile(clock)
    with driven_here(tmp_path / "lock"), pytest.raises(CloudError, match="is starting run-1 and has not ended"):
        end_starting(context, lease(file, "down"), tmp_path / "lock", "run-1", "deleted")
    assert PATIENCE_SECONDS <= clock.elapsed < PATIENCE_SECONDS + 2
    with driven_here(tmp_path / "lock"):
        lease(file, "anna").ensure()  # it has its lease now, and whoever holds one is asked for it
        assert not end_starting(context, lease(file, "down"), tmp_path / "lock", "run-1", "deleted")

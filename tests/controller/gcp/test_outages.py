"""An outage of the bucket is waited out, for a time that is named; a refusal is not."""

import gc
from collections.abc import Callable

import pytest

from controller.core.errors import CloudError
from controller.core.this_process import Clock
from controller.gcp.google_errors import UNREACHABLE, ForbiddenError, GoogleError
from controller.gcp.outages import OUTAGE_PAUSE_SECONDS, OUTAGE_SECONDS, Retries, outlast, wait_out
from tests.fakes.clock import ManualClock


def answering(*errors: GoogleError | None) -> Callable[[], str]:
    """A request with these answers, the last one for ever."""
    left = list(errors)

    def act() -> str:
        error = left.pop(0) if left[1:] else left[0]
        if error is not None:
            raise error
        return "the answer"

    return act


STORM = GoogleError("storage objects.get", 503, "UNAVAILABLE", "backend error")


def test_a_storm_is_waited_out_and_said_once() -> None:
    clock, said = ManualClock(), list[str]()
    assert wait_out(clock, answering(STORM, STORM, STORM, None), "gs://b", said.append) == "the answer"
    assert said == ["gs://b answers 503 UNAVAILABLE; waiting, for at most 10 minutes"]
    assert clock.elapsed == 3 * OUTAGE_PAUSE_SECONDS


def test_the_wait_has_an_end_and_the_message_names_it() -> None:
    clock = ManualClock()
    message = r"^gs://b has answered only 503 UNAVAILABLE for 10 minutes \(backend error\); nothing was changed\. Run"
    with pytest.raises(CloudError, match=message):
        wait_out(clock, answering(STORM), "gs://b", lambda _: None)
    assert clock.elapsed == OUTAGE_SECONDS


@pytest.mark.parametrize(
    "error", [ForbiddenError("get", 403, "denied", "no"), GoogleError("get", 503, UNREACHABLE, "no network")]
)
def test_what_waiting_does_not_change_is_raised_at_once(error: GoogleError) -> None:
    clock, said = ManualClock(), list[str]()
    with pytest.raises(GoogleError) as raised:
        wait_out(clock, answering(error), "gs://b", said.append)
    assert (raised.value, clock.elapsed, said) == (error, 0.0, [])


OFFLINE = GoogleError("storage objects.get", 503, UNREACHABLE, "no network")


def test_an_outage_during_a_run_is_outlasted_and_said_once() -> None:
    clock, said = ManualClock(), list[str]()
    assert outlast(clock, answering(STORM, OFFLINE, STORM, None), "gs://b", said.append, 24) == "the answer"
    assert said == ["gs://b does not answer (backend error); the run goes on, waiting"]


@pytest.mark.parametrize(("hours", "seconds"), [(24, 24 * 3600), (0, OUTAGE_SECONDS)])
def test_an_outage_during_a_run_has_a_bound_with_a_key(hours: float, seconds: float) -> None:
    clock = ManualClock()
    with pytest.raises(
        CloudError, match=r"^gs://b has not answered for .* h, the limit \(checkpoint\.max_outage_hours\)"
    ):
        outlast(clock, answering(STORM), "gs://b", lambda _: None, hours)
    assert clock.elapsed == seconds


def test_a_machine_without_a_network_waits_for_its_return() -> None:
    clock = ManualClock()
    hours = [OFFLINE] * int(3 * 3600 / OUTAGE_PAUSE_SECONDS)
    assert outlast(clock, answering(*hours, None), "gs://b", lambda _: None, 1) == "the answer"


def test_a_refusal_is_no_outage() -> None:
    with pytest.raises(ForbiddenError):
        outlast(ManualClock(), answering(ForbiddenError("get", 403, "denied", "no")), "gs://b", lambda _: None, 24)


def test_requests_leave_nothing_to_the_garbage_collector() -> None:
    retries = Retries(Clock())
    retries.call(int)
    gc.collect()
    for _ in range(100):
        retries.call(int)
    assert gc.collect() < 100, "found after 100 requests, those of other threads included"

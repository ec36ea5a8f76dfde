"""Google's answers: a wait for an operation ends with one, or with its controller; and each of them tells the time."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.this_process import TOLERANCE_SECONDS, Clock, InterruptedSleepError, boot_time
from controller.gcp.answers import OperationFailedError, wait_compute
from controller.gcp.google_errors import GoogleError
from tests.controller.resources.conftest import EmulatedProject


def caller(call: Any) -> Any:
    return SimpleNamespace(google=SimpleNamespace(call=call), project="p", clock=Clock())


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_wait_ends_at_once_when_its_controller_is_to_end(when: str) -> None:
    """Google answers it after up to two minutes, and whoever wants the lease must not wait for that."""
    asked, over = threading.Event(), threading.Event()

    def call(api: str, method: str, **where: Any) -> dict[str, Any]:
        asked.set()
        over.wait(60)
        return {"status": "DONE"}

    waits = caller(call)

    def lose_lease() -> None:
        asked.wait(60)
        waits.clock.interrupt()

    if when == "before":
        waits.clock.interrupt()
    threading.Thread(target=lose_lease).start()
    with pytest.raises(InterruptedSleepError):
        wait_compute(waits, {"name": "op", "status": "RUNNING"})
    assert not over.is_set()
    over.set()


def test_a_wait_raises_what_its_request_or_its_operation_says() -> None:
    busy = GoogleError("compute", 503, "UNAVAILABLE", "backend error")

    def refuse(api: str, method: str, **where: Any) -> dict[str, Any]:
        raise busy

    with pytest.raises(GoogleError) as raised:
        wait_compute(caller(refuse), {"name": "op", "status": "RUNNING"})
    assert raised.value is busy
    answers = iter([{"status": "RUNNING"}, {"status": "DONE", "error": {"errors": [{"code": "STOCKOUT"}]}}])
    with pytest.raises(OperationFailedError) as failed:
        wait_compute(caller(lambda api, method, **where: next(answers)), {"name": "op", "status": "PENDING"})
    assert failed.value.reason == "STOCKOUT"


def test_an_answer_of_google_corrects_it_unless_it_came_late(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    google, clock = project.context.google, project.clock
    for off in (7200.0, -7200.0, 5.0):
        clock._booted = time.time() - boot_time() + off
        google.call("compute", "networks.list", project=project.context.project)
        expected = off if abs(off) < TOLERANCE_SECONDS else 0.0
        assert clock.now() - time.time() - expected == pytest.approx(0.0, abs=TOLERANCE_SECONDS)
    clock._booted += 7200.0
    boot_times = iter(range(0, 10_000, 100))
    monkeypatch.setattr(clock, "boot_time", lambda: float(next(boot_times)))
    google.call("compute", "networks.list", project=project.context.project)
    assert clock.now() - time.time() > 7000.0, "this machine slept before it read the answer"

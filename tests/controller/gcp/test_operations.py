"""Codes of failed operations. Waiting for operations is tested with the resources that wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from controller.gcp.operations import OperationFailedError, code_name, poll_compute


@pytest.mark.parametrize(
    ("status", "name"),
    [
        ({"code": 8, "message": "no capacity"}, "RESOURCE_EXHAUSTED"),
        ({"code": 13}, "INTERNAL"),
        ({"message": "no code"}, "UNKNOWN"),
        ({"code": 4711}, "UNKNOWN"),
    ],
)
def test_a_status_has_the_name_of_its_code(status: dict[str, object], name: str) -> None:
    assert code_name(status) == name


def test_a_poll_asks_google_once_each_time_and_does_not_wait() -> None:
    asked: list[dict[str, Any]] = []
    answers = iter([{"status": "RUNNING"}, {"status": "DONE", "error": {"errors": [{"code": "STOCKOUT"}]}}])

    def call(api: str, method: str, **where: Any) -> dict[str, Any]:
        asked.append({"method": method, **where})
        return {"name": "op", **next(answers)}

    caller: Any = SimpleNamespace(google=SimpleNamespace(call=call), project="p")
    is_done = poll_compute(caller, {"name": "op", "zone": "https://x/zones/a-b-c", "status": "PENDING"})
    assert [is_done(), is_done()] == [False, False]  # the first answer is that of the request itself
    with pytest.raises(OperationFailedError) as refused:
        is_done()
    assert refused.value.reason == "STOCKOUT"
    assert asked == [{"method": "zoneOperations.get", "project": "p", "operation": "op", "zone": "a-b-c"}] * 2

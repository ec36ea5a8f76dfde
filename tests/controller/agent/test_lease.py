"""Orders of a controller that another one has followed."""

from __future__ import annotations

import json

from tests.controller.agent.conftest import AgentWorker


def test_orders_with_an_older_lease_are_refused(worker: AgentWorker) -> None:
    for token in (3, 5, 5):
        worker.call("watchdog_state", lease={"place": "gs://b/pods/pod", "token": token})
    said = worker.call_error("watchdog_state", lease={"place": "gs://b/pods/pod", "token": 4})
    assert said["error"] == "another controller has taken over this pod (lease 5, not 4)"
    worker.call("watchdog_state", lease={"place": "gs://b/pods/pod", "token": 5})


def test_leases_of_different_places_are_not_compared(worker: AgentWorker) -> None:
    """A bucket that was deleted, or another one, counts from the beginning."""
    worker.call("watchdog_state", lease={"place": "gs://b/pods/pod", "token": 5})
    worker.call("watchdog_state", lease={"place": "gs://other/pods/pod", "token": 1})
    worker.call("watchdog_state")  # a look without a lease
    assert json.loads((worker.home / ".slipway/lease.json").read_text()) == {
        "format": 1,
        "place": "gs://other/pods/pod",
        "token": 1,
    }

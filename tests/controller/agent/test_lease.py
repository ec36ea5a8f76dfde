"""Orders of a controller that another one has followed."""

from __future__ import annotations

import json

from tests.controller.agent.conftest import AgentWorker


def test_orders_with_an_older_lease_of_the_same_place_are_refused(worker: AgentWorker) -> None:
    """A bucket that was deleted, or another one, counts from the beginning."""
    for token in (3, 5, 5):
        worker.call("watchdog_state", lease={"place": "gs://b/pods/pod", "token": token})
    said = worker.call_error("watchdog_state", lease={"place": "gs://b/pods/pod", "token": 4})
    assert said["error"] == "another controller has taken over this pod (lease 5, not 4)"
    worker.call("watchdog_state", lease={"place": "gs://other/pods/pod", "token": 1})
    worker.call("watchdog_state")  # a look without a lease
    kept = json.loads((worker.home / ".slipway/lease.json").read_text())
    assert kept == {"format": 1, "place": "gs://other/pods/pod", "token": 1}

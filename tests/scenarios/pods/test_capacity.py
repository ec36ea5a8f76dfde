"""`up` where the first zone has no room: another region, its subnet and its NAT, and everything that follows."""

from __future__ import annotations

import pytest

from tests.controller.conftest import ECHO_COMMAND, SlipwayCli

PLACES = [
    "tpu=v5litepod_8",
    "tpu.fallback_zones=[us-east1-b]",
    "tpu.capacity=[on_demand,spot]",
    "cloud.bucket_location=us",
]


@pytest.mark.e2e
def test_a_run_ends_well_in_the_second_zone(slipway: SlipwayCli) -> None:
    nowhere = "cloud.faults=[{kind: stockout, zone: us-west4-a, times: 9, at: request}]"
    words = [*PLACES, ECHO_COMMAND, nowhere, "cleanup.on_success=keep"]
    code, out, err = slipway("up", *words)
    assert (code, err) == (0, "")
    assert "no capacity in us-west4-a (on_demand) (attempt 1): There is no more capacity in the zone" in out
    assert "requesting v5litepod-8 in us-east1-b (on_demand)" in out
    assert "hello from worker 0" in out
    pod = slipway.json("status", *words)["pod"]
    assert (pod["state"], pod["zone"], pod["capacity"]) == ("ready", "us-east1-b", "on_demand")
    actions = {row["action"] for row in slipway.json("plan", *words)["resources"]}
    assert actions == {"none"}
    assert slipway("down", "--yes", *words)[0] == 0
    state = slipway.cloud().get("state")
    assert state["node"] == state["queued"] == {}
    asked = [(one["zone"], one["tier"], one["answer"], one["ended"]) for one in slipway.json("capacity", *words)]
    refused = [("us-west4-a", tier, "stock_out", "") for tier in ("on_demand", "spot")]
    assert asked == [*refused, ("us-east1-b", "on_demand", "granted", "deleted")]

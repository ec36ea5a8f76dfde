"""`up` where the first zone has no room: another region, its subnet and its NAT, and everything that follows."""

from __future__ import annotations

import pytest

from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.planes import Plane, pods

PLACES = [
    "tpu.zone=us-east5-b",
    "tpu.fallback_zones=[us-east1-d]",
    "tpu.capacity=[on_demand,spot]",
    "cloud.bucket_location=us",
]
NO_CAPACITY = {
    "tpu_api": "There is no more capacity in the zone",
    "compute_engine": "The zone 'projects/slipway-local/zones/us-east5-b' does not have enough resources",
}


@pytest.mark.deep
@pytest.mark.e2e
@pytest.mark.always_on("compute_engine")
def test_a_run_ends_well_in_the_second_zone(slipway: SlipwayCli, plane: Plane) -> None:
    nowhere = "cloud.faults=[{kind: stockout, zone: us-east5-b, times: 9, at: request}]"
    words = [*plane.one, *PLACES, ECHO_COMMAND, nowhere, "cleanup.on_success=keep"]
    code, out, err = slipway("up", *words)
    assert (code, err) == (0, "")
    assert f"no capacity in us-east5-b (on_demand) (attempt 1): {NO_CAPACITY[plane.name]}" in out
    assert "requesting v6e-1 in us-east1-d (on_demand)" in out
    assert "hello from worker 0" in out
    pod = slipway.json("status", *words)["pod"]
    assert (pod["state"], pod["zone"], pod["capacity"]) == ("ready", "us-east1-d", "on_demand")
    actions = {row["action"] for row in slipway.json("plan", *words)["resources"]}
    assert actions == {"none"}
    assert slipway("down", "--yes", *words)[0] == 0
    assert pods(slipway.cloud().get("state")) == {}
    asked = [(one["zone"], one["tier"], one["answer"], one["ended"]) for one in slipway.json("capacity", *words)]
    refused = [("us-east5-b", tier, "stock_out", "") for tier in ("on_demand", "spot")]
    assert asked == [*refused, ("us-east1-d", "on_demand", "granted", "deleted")]

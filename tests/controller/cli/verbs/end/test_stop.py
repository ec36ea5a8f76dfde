"""`slipway stop` and the `up` that follows it."""

from __future__ import annotations

import pytest

from tests.controller.conftest import ECHO_COMMAND, SlipwayCli

ONE = ["tpu=v5litepod_8", "tpu.capacity=on_demand", "cleanup.on_success=keep", ECHO_COMMAND]


@pytest.mark.deep
@pytest.mark.e2e
def test_a_stopped_pod_is_started_by_the_next_up(slipway: SlipwayCli) -> None:
    code, _, err = slipway("stop", *ONE)
    assert code == 2
    assert "is absent or not ready, so it cannot be stopped" in err
    assert slipway("up", *ONE)[0] == 0
    code, out, _ = slipway("stop", *ONE)
    assert code == 0
    assert "is stopped; `slipway up` starts it" in out
    assert slipway.json("status", *ONE)["pod"]["state"] == "stopped"
    assert "is already stopped" in slipway("stop", *ONE)[1]
    code, out, _ = slipway("up", *ONE, "run.seed=7")
    assert code == 0
    assert "the node is stopped; starting it" in out
    assert "hello from worker 0" in out
    creations = [m for m in slipway.mutations() if m.startswith("POST /tpu/") and "queuedResources" in m]
    assert len(creations) == 1


@pytest.mark.deep
@pytest.mark.e2e
def test_what_google_does_not_stop_is_refused(slipway: SlipwayCli) -> None:
    spot = ["tpu=v5litepod_8", "cleanup.on_success=keep", ECHO_COMMAND]
    assert slipway("up", *spot)[0] == 0
    code, _, err = slipway("stop", *spot)
    assert code == 2
    assert "tpu.capacity: Google cannot stop spot pods; `slipway down` deletes it" in err

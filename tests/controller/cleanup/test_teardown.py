"""What `down` deletes besides the resources that its config names."""

from __future__ import annotations

import json

import pytest

from tests.controller.cleanup.test_orphans import google_of
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.planes import Plane, pods

OWNER, SAMPLERS = "tpu.name=mine", "tpu.name=mine-sampler-2"
KEEP = "cleanup.on_success=keep"


@pytest.mark.e2e
def test_pods_of_samplers_of_an_earlier_config_are_deleted_and_no_other_pod(slipway: SlipwayCli, plane: Plane) -> None:
    assert slipway("up", ECHO_COMMAND, KEEP, SAMPLERS, *plane.one)[0] == 0
    google = google_of(slipway)
    bucket = slipway.json("status", ECHO_COMMAND, KEEP, SAMPLERS, *plane.one)["run"]["results"].split("/")[2]
    listed = google.list_all("storage", "objects.list", "items", bucket=bucket, prefix="pods/mine-sampler-2/claims/")
    [name] = [item["name"] for item in listed]
    assert slipway("down", ECHO_COMMAND, OWNER, *plane.one)[0] == 0
    assert pods(slipway.cloud().get("state")), "another run's pod, whatever its name"
    claim = json.loads(google.download(bucket, name))
    google.upload(bucket, name, json.dumps(claim | {"latest": "run-0a1b2c3d-sampler-2"}).encode())
    google.close()
    assert slipway("down", ECHO_COMMAND, "tpu.name=min", *plane.one)[0] == 0
    assert pods(slipway.cloud().get("state")), "another pod's samplers"
    code, out, err = slipway("down", ECHO_COMMAND, OWNER, *plane.one)
    assert code == 0, err
    assert pods(slipway.cloud().get("state")) == {}, (out, err)

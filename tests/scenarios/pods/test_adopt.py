"""A pod that somebody else has made, used by `up` and left by `down`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from controller.context import Context
from controller.core.clock import Clock
from controller.core.events import Events
from controller.gcp.client import GoogleClient
from controller.gcp.operations import wait_compute, wait_rpc
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.controller.localcloud.harness import EmulatedCloud
from tests.controller.state import comparable_state

ADOPT = ["tpu=v5litepod_8", "tpu.name=stable-1", "tpu.adopt=true", ECHO_COMMAND]
PROJECT = "projects/slipway-local"


@pytest.fixture
def context(slipway: SlipwayCli) -> Iterator[Context]:
    from google.oauth2.credentials import Credentials

    cloud, clock = slipway.cloud(), Clock()
    EmulatedCloud(slipway.home / "localcloud").establish()
    google = GoogleClient(Credentials(token=cloud.token), clock, cloud.roots)
    none = cast(Any, None)
    yield Context("slipway-local", google, clock, Events(clock), Path("unused"), none, 0.02, none)
    google.close()


def make_by_hand(context: Context) -> None:
    """What another tool has made: a network of its own that admits SSH, and a pod in it."""
    network = f"{PROJECT}/global/networks/theirs"
    subnet = {"name": "theirs", "network": network, "ipCidrRange": "10.9.0.0/24"}
    ssh = {"name": "theirs-all", "network": network, "allowed": [{"IPProtocol": "tcp"}], "sourceRanges": ["0.0.0.0/0"]}
    where = {"project": "slipway-local"}
    insert = context.google.call
    wait_compute(
        context, insert("compute", "networks.insert", **where, body={"name": "theirs", "autoCreateSubnetworks": False})
    )
    wait_compute(context, insert("compute", "subnetworks.insert", **where, region="us-west4", body=subnet))
    wait_compute(context, insert("compute", "firewalls.insert", **where, body=ssh))
    node = {
        "acceleratorType": "v5litepod-8",
        "runtimeVersion": "v2-alpha-tpuv5-lite",
        "networkConfig": {"network": "theirs", "subnetwork": "theirs", "enableExternalIps": True},
    }
    parent = f"{PROJECT}/locations/us-west4-a"
    operation = insert("tpu", "projects.locations.nodes.create", parent=parent, nodeId="stable-1", body=node)
    wait_rpc(context, "tpu", operation, "projects.locations.operations.get")


@pytest.mark.e2e
def test_an_adopted_pod_is_used_and_left_as_it_was(slipway: SlipwayCli, context: Context) -> None:
    code, out, err = slipway("plan", *ADOPT)
    assert code == 2
    assert "pod stable-1 does not exist in us-west4-a, and tpu.adopt=true requires an existing pod" in out + err
    make_by_hand(context)
    before = comparable_state(slipway.cloud().get("state"))
    code, out, err = slipway("up", *ADOPT)
    assert (code, err) == (0, "")
    assert "hello from worker 0" in out
    code, out, _ = slipway("down", "--all", "--yes", *ADOPT)
    assert code == 0
    after = comparable_state(slipway.cloud().get("state"))
    for state in (before, after):
        for node in state["node"].values():
            node.pop("metadata", None)  # our key was let in, beside theirs
        for kind in ("bucket", "objects"):
            state.pop(kind)
    assert after == before
    code, out, err = slipway("stop", *ADOPT)
    assert code == 2
    assert "was not created by Slipway" in err

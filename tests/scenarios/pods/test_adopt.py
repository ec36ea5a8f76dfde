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
from tests.planes import Plane, pods

PLACES = {
    "tpu_api": ("tpu.accelerator_type=v6e-1", "tpu.zone=us-east5-b", "tpu.plane=tpu_api"),
    "compute_engine": ("tpu.accelerator_type=v6e-1", "tpu.zone=us-east5-b", "tpu.plane=compute_engine"),
}
ACCOUNT = "314159265358-compute@developer.gserviceaccount.com"
"""Without one a VM of Compute Engine has no access to the bucket; a TPU node gets it by itself."""
ZONE, REGION = "us-east5-b", "us-east5"
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


def make_by_hand(context: Context, plane: Plane) -> None:
    """What another tool has made: a network of its own that admits SSH, and a pod in it."""
    network = f"{PROJECT}/global/networks/theirs"
    subnet = {"name": "theirs", "network": network, "ipCidrRange": "10.9.0.0/24"}
    ssh = {"name": "theirs-all", "network": network, "allowed": [{"IPProtocol": "tcp"}], "sourceRanges": ["0.0.0.0/0"]}
    where = {"project": "slipway-local"}
    insert = context.google.call
    wait_compute(
        context, insert("compute", "networks.insert", **where, body={"name": "theirs", "autoCreateSubnetworks": False})
    )
    wait_compute(context, insert("compute", "subnetworks.insert", **where, region=REGION, body=subnet))
    wait_compute(context, insert("compute", "firewalls.insert", **where, body=ssh))
    if plane.is_compute_engine:
        wait_compute(context, insert("compute", "instances.insert", **where, zone=ZONE, body=instance()))
        return
    node = {
        "acceleratorType": "v6e-1",
        "runtimeVersion": "v2-alpha-tpuv6e",
        "networkConfig": {"network": "theirs", "subnetwork": "theirs", "enableExternalIps": True},
    }
    parent = f"{PROJECT}/locations/{ZONE}"
    operation = insert("tpu", "projects.locations.nodes.create", parent=parent, nodeId="stable-1", body=node)
    wait_rpc(context, "tpu", operation, "projects.locations.operations.get")


def instance() -> dict[str, Any]:
    """Return a TPU VM as its owner asked Compute Engine for it; SSH needs its guest attributes."""
    image = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
    disk = {"diskSizeGb": "200", "diskType": f"{PROJECT}/zones/{ZONE}/diskTypes/hyperdisk-balanced"}
    card = {
        "network": f"{PROJECT}/global/networks/theirs",
        "subnetwork": f"{PROJECT}/regions/{REGION}/subnetworks/theirs",
    }
    return {
        "name": "stable-1",
        "machineType": f"{PROJECT}/zones/{ZONE}/machineTypes/ct6e-standard-1t",
        "scheduling": {"provisioningModel": "STANDARD", "onHostMaintenance": "TERMINATE"},
        "disks": [{"boot": True, "autoDelete": True, "type": "PERSISTENT",
                   "initializeParams": {"sourceImage": image, **disk}}],
        "networkInterfaces": [{**card, "accessConfigs": [{"name": "external-nat", "type": "ONE_TO_ONE_NAT"}]}],
        "serviceAccounts": [{"email": ACCOUNT, "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}],
        "metadata": {"items": [{"key": "enable-guest-attributes", "value": "TRUE"}]},
    }  # fmt: skip


def refuses_without_account(slipway: SlipwayCli, context: Context, words: list[str]) -> None:
    """A VM without a service account is an error; then it is made again with one."""
    where = {"project": "slipway-local", "zone": ZONE}
    for body in ({**instance(), "serviceAccounts": []}, instance()):
        wait_compute(context, context.google.call("compute", "instances.delete", **where, instance="stable-1"))
        wait_compute(context, context.google.call("compute", "instances.insert", **where, body=body))
        if not body["serviceAccounts"]:
            before = comparable_state(slipway.cloud().get("state"))
            refused = "pod stable-1: VM stable-1 has no service account, so it cannot use the bucket"
            code, out, err = slipway("plan", *words)
            assert (code, refused in " ".join((out + err).split())) == (2, True)
            assert comparable_state(slipway.cloud().get("state")) == before
            code, out, err = slipway("up", *words)
            assert (code, refused in " ".join((out + err).split())) == (2, True)
            assert slipway("down", "--all", "--yes", *words)[0] == 0


@pytest.mark.e2e
def test_an_adopted_pod_is_used_and_left_as_it_was(slipway: SlipwayCli, context: Context, plane: Plane) -> None:
    words = [*PLACES[plane.name], "tpu.name=stable-1", "tpu.adopt=true", ECHO_COMMAND]
    code, out, err = slipway("plan", *words)
    assert code == 2
    assert f"pod stable-1 does not exist in {ZONE}, and tpu.adopt=true requires an existing pod" in out + err
    make_by_hand(context, plane)
    if plane.is_compute_engine:
        refuses_without_account(slipway, context, words)
    before = comparable_state(slipway.cloud().get("state"))
    code, out, err = slipway("up", *words)
    assert (code, err) == (0, "")
    assert "hello from worker 0" in out
    code, out, _ = slipway("down", "--all", "--yes", *words)
    assert code == 0
    after = comparable_state(slipway.cloud().get("state"))
    for state in (before, after):
        for one in pods(state).values():
            one.pop("metadata", None)  # our key was let in, beside theirs
        for kind in ("bucket", "objects"):
            state.pop(kind)
    assert after == before
    code, out, err = slipway("stop", *words)
    assert code == 2
    assert "was not created by Slipway" in err

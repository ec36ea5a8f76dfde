"""A pod that somebody else has made, used by `up` and left by `down`."""

from typing import Any

import pytest

from tests.controller.conftest import ECHO_COMMAND, SlipwayCli, comparable_state
from tests.controller.localcloud.harness import COMPUTE, PROJECT, EmulatedCloud
from tests.planes import Plane, pods

ACCOUNT = "314159265358-compute@developer.gserviceaccount.com"
"""Without one a VM of Compute Engine has no access to the bucket; a TPU node gets it by itself."""
ZONE, REGION = "us-east5-b", "us-east5"
INSTANCES = f"{COMPUTE}/zones/{ZONE}/instances"


def make_by_hand(cloud: EmulatedCloud, plane: Plane) -> None:
    """What another tool has made: a network of its own that admits SSH, and a pod in it."""
    cloud.call_and_wait("POST", f"{COMPUTE}/global/networks", {"name": "theirs", "autoCreateSubnetworks": False})
    subnet = {"name": "theirs", "network": f"{PROJECT}/global/networks/theirs", "ipCidrRange": "10.9.0.0/24"}
    cloud.call_and_wait("POST", f"{COMPUTE}/regions/{REGION}/subnetworks", subnet)
    cloud.create_rule("theirs-all", "theirs", None, ["0.0.0.0/0"])
    if plane.is_compute_engine:
        cloud.call_and_wait("POST", INSTANCES, instance())
        return
    node = {
        "acceleratorType": "v6e-1",
        "runtimeVersion": "v2-alpha-tpuv6e",
        "networkConfig": {"network": "theirs", "subnetwork": "theirs", "enableExternalIps": True},
    }
    cloud.call_and_wait("POST", f"tpu/v2/{PROJECT}/locations/{ZONE}/nodes?nodeId=stable-1", node)


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


def refuses_without_account(slipway: SlipwayCli, cloud: EmulatedCloud, words: list[str]) -> None:
    """A VM without a service account is an error; then it is made again with one."""
    cloud.delete(f"{INSTANCES}/stable-1")
    cloud.call_and_wait("POST", INSTANCES, {**instance(), "serviceAccounts": []})
    before = comparable_state(slipway.cloud().get("state"))
    refused = "pod stable-1: VM stable-1 has no service account, so it cannot use the bucket"
    for verb in ("plan", "up"):
        code, out, err = slipway(verb, *words)
        assert (code, refused in " ".join((out + err).split())) == (2, True)
        assert verb == "up" or comparable_state(slipway.cloud().get("state")) == before
    assert slipway("down", "--all", "--yes", *words)[0] == 0
    cloud.delete(f"{INSTANCES}/stable-1")
    cloud.call_and_wait("POST", INSTANCES, instance())


@pytest.mark.e2e
def test_an_adopted_pod_is_used_and_left_as_it_was(slipway: SlipwayCli, plane: Plane) -> None:
    cloud = EmulatedCloud(slipway.cloud().state)
    cloud.establish()
    words = [
        "tpu.accelerator_type=v6e-1",
        f"tpu.zone={ZONE}",
        f"tpu.plane={plane}",
        "tpu.name=stable-1",
        "tpu.adopt=true",
        ECHO_COMMAND,
    ]
    code, out, err = slipway("plan", *words)
    assert code == 2
    assert f"pod stable-1 does not exist in {ZONE}, and tpu.adopt=true requires an existing pod" in out + err
    make_by_hand(cloud, plane)
    if plane.is_compute_engine:
        refuses_without_account(slipway, cloud, words)
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

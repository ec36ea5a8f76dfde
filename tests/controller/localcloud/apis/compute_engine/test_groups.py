"""Managed instance groups of TPU VMs: a slice is made all at once, works like a pod, and is deleted as a whole."""

from __future__ import annotations

import asyncio

import pytest

from tests.controller.localcloud.apis.compute_engine.slices import (
    GROUPS,
    INSTANCES,
    POLICIES,
    TEMPLATES,
    create_group,
    managed,
    run,
)
from tests.controller.localcloud.harness import EmulatedCloud


@pytest.fixture(scope="module")
def network(cloud: EmulatedCloud) -> str:
    cloud.create_network("net")
    return "net"


def test_a_slice_of_two_vms(cloud: EmulatedCloud, network: str) -> None:
    group = create_group(cloud, "two", network)
    assert group["targetSize"] == 2
    assert group["status"]["currentInstanceStatuses"] == {"running": 2}
    members = managed(cloud, "two")
    assert [(one["instanceStatus"], one["currentAction"]) for one in members] == [("RUNNING", "NONE")] * 2
    names = [one["name"] for one in members]
    assert [asyncio.run(run(cloud, name, "echo here")) for name in names] == ["here\n"] * 2
    ask = "curl -s -H 'Metadata-Flavor: Google' http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes"
    order = asyncio.run(run(cloud, names[0], f"{ask}/worker-network-endpoints")).split(",")
    assert sorted(order) == names
    for index, name in enumerate(order):
        facts = asyncio.run(run(cloud, name, f"{ask}/tpu-env"))
        assert f"TPU_WORKER_ID: '{index}'" in facts
        assert "TOPOLOGY: '2x4'" in facts
        assert asyncio.run(run(cloud, name, "echo $TPU_WORKER_ID")) == f"{index}\n"
    cloud.call_and_wait("DELETE", f"{GROUPS}/two")
    cloud.call_and_wait("DELETE", f"{TEMPLATES}/two")
    cloud.call_and_wait("DELETE", f"{POLICIES}/two")
    assert cloud.call("GET", f"{INSTANCES}/{names[0]}")[0] == 404

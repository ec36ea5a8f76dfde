"""What is sent to make a pod beside what gcloud sends (tests/controller/gcloud), and what is read from the answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.context import Context
from controller.gcp.timestamps import parse_timestamp
from controller.resources.pod.planes import waits_in_queue
from controller.resources.pod.provisioner import Place, SliceSpec
from controller.resources.pod.slices import Slices
from controller.resources.pod.tpu_api import nodes, queued
from tests.fakes.context import make_context

SPEC = SliceSpec(
    workers=1, accelerator_type="v4-8", runtime_version="tpu-ubuntu2204-base", network="net1", external_ip=False,
    service_account="sa",
)  # fmt: skip
PLACE = Place("us-central2-b", "spot", "sub1", "node")
QUEUED = replace(PLACE, provisioner="queued")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    google = SimpleNamespace(root=lambda api: f"https://{api}.googleapis.com/")
    return make_context(google, tmp_path, project="p1")


@pytest.mark.parametrize(
    ("capacity", "fields"),
    [
        ("on_demand", {"guaranteed": {}}),
        ("reserved", {"reservationName": "projects/p1/locations/us-central2-b/reservations/mine"}),
        ("flex_start", {"provisioningModel": "FLEX_START", "runDuration": {"maxRunDuration": "604800s"}}),
    ],
)
def test_the_other_tiers(context: Context, capacity: str, fields: dict[str, Any]) -> None:
    sent = queued.request_body(context, "n1", replace(SPEC, reservation="mine"), replace(QUEUED, capacity=capacity))
    assert {k: v for k, v in sent.items() if k != "tpu"} == fields


def test_a_data_disk_is_attached_and_mounted_by_the_node_itself(context: Context) -> None:
    sent = nodes.node_body(context, "n1", replace(SPEC, data_disk_gb=100), PLACE)
    assert sent["dataDisks"] == [{"sourceDisk": "projects/p1/zones/us-central2-b/disks/n1-data", "mode": "READ_WRITE"}]
    script = sent["metadata"]["startup-script"]
    assert str(100 * 2**30) in script
    assert script.index("blkid") < script.index("mkfs") < script.index("mount")
    assert "startup-script" not in nodes.node_body(context, "n1", SPEC, PLACE)["metadata"]


def test_a_pod_starts_its_dead_mans_switch_unless_that_is_off(context: Context) -> None:
    limited = replace(SPEC, heartbeat_timeout_seconds=7200.0)
    where = "https://tpu.googleapis.com/v2/projects/p1/locations/us-central2-b"
    switch = f"7200 '{where}/queuedResources/n1?force=true' {where}/nodes/n1 <"
    for body, mounts in (
        (nodes.node_body(context, "n1", limited, PLACE), False),
        (queued.request_body(context, "n1", limited, QUEUED)["tpu"]["nodeSpec"][0]["node"], False),
        (nodes.node_body(context, "n1", replace(limited, data_disk_gb=100), PLACE), True),
    ):
        assert switch in body["metadata"]["startup-script"]
        assert ("lsblk" in body["metadata"]["startup-script"]) == mounts


def test_times_are_read_to_the_microsecond() -> None:
    assert parse_timestamp("2026-11-20T23:28:17.123456789Z") == pytest.approx(1795217297.123456)
    assert parse_timestamp("2026-11-20T23:28:17Z") == 1795217297
    assert parse_timestamp(None) == 0


REQUEST = {
    "name": "projects/p/locations/us-central2-b/queuedResources/q",
    "createTime": "2026-11-20T00:00:00Z",
    "spot": {},
    "queueingPolicy": {"validUntilDuration": "3600s"},
    "tpu": {"nodeSpec": [{"node": {"acceleratorType": "v4-8", "labels": {"managed-by": "slipway"}}}]},
}
NODE = {"name": "projects/p/locations/us-central2-b/nodes/q", "id": "1", "acceleratorType": "v4-8"}
CREATED = parse_timestamp("2026-11-20T00:00:00Z")


@pytest.mark.parametrize(
    ("state", "of_node", "later", "seen", "pending"),
    [
        ("ACCEPTED", None, 10, "ACCEPTED", True),
        ("WAITING_FOR_RESOURCES", None, 10, "WAITING_FOR_RESOURCES", True),
        ("WAITING_FOR_RESOURCES", None, 3601, "EXPIRED", False),
        ("PROVISIONING", "CREATING", 10, "PROVISIONING", True),
        ("ACTIVE", "READY", 9999, "READY", False),
        ("ACTIVE", "REPAIRING", 10, "REPAIRING", True),
        ("ACTIVE", "PREEMPTED", 10, "PREEMPTED", False),
        ("ACTIVE", None, 10, "GONE", False),
        ("SUSPENDING", "PREEMPTED", 10, "SUSPENDING", True),
        ("SUSPENDED", "PREEMPTED", 10, "PREEMPTED", False),
        ("SUSPENDED", "READY", 10, "SUSPENDED", False),
        ("SUSPENDING", "DELETING", 10, "SUSPENDING", True),
        ("SUSPENDED", None, 10, "SUSPENDED", False),
        ("FAILED", None, 10, "FAILED", False),
        ("DELETING", None, 10, "DELETING", True),
    ],
)
def test_a_request_and_its_node_are_one_thing(
    state: str, of_node: str | None, later: float, seen: str, pending: bool
) -> None:
    answer = None if of_node is None else {**NODE, "state": of_node}
    found = queued.parse_request({**REQUEST, "state": {"state": state}}, answer, CREATED + later)
    assert (found.state, found.pending) == (seen, pending)
    assert found.place.zone == "us-central2-b"
    assert waits_in_queue(found.place)


def test_what_a_waiting_request_wants_is_known_from_it() -> None:
    found = queued.parse_request({**REQUEST, "state": {"state": "ACCEPTED"}}, None, CREATED)
    assert (found.spec.accelerator_type, found.place.capacity) == ("v4-8", "spot")
    assert found.labels == (("managed-by", "slipway"),)
    assert found.uid == ""


@pytest.mark.parametrize(
    ("answer", "repaired"),
    [
        ({"state": "READY", "health": "HEALTHY"}, []),
        ({"state": "REPAIRING"}, ["7"]),
        ({"state": "READY", "health": "UNHEALTHY_MAINTENANCE"}, ["7"]),
        ({"state": "READY", "upcomingMaintenance": {"maintenanceStatus": "ONGOING"}}, ["7"]),
        ({"state": "READY", "upcomingMaintenance": {"maintenanceStatus": "PENDING"}}, []),
    ],
)
def test_a_repair_that_google_reports_lets_host_keys_change(
    answer: dict[str, Any], repaired: list[str], tmp_path: Path
) -> None:
    told: list[str] = []
    status = nodes.parse_node({**NODE, "id": "7", **answer})
    api = SimpleNamespace(observe=lambda context, name, zone: status)
    context = SimpleNamespace(fleets=SimpleNamespace(expect_new_host_keys=told.append), state_dir=tmp_path)
    slices = Slices("q", ["us-central2-b"], {"node": cast(Any, api)})
    assert slices.find(cast(Any, context)) is status
    assert told == repaired

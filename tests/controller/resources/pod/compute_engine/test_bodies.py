"""What is sent to Compute Engine: the fields that the discovery document has, and those that Google needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.context import Context
from controller.localcloud.http.discovery import Method, load_discovery
from controller.localcloud.http.validation import Validation
from controller.resources.pod.compute_engine import bodies
from controller.resources.pod.compute_engine.spec import VmSpec, vm_spec
from controller.resources.pod.provisioner import Place, SliceSpec
from tests.fakes.context import make_context

ZONE = "us-east5-b"
SPEC = SliceSpec(
    workers=2,
    accelerator_type="v6e-8",
    runtime_version="ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    network="net1",
    external_ip=False,
    service_account="sa",
    own=VmSpec("ct6e-standard-4t", "2x4", boot_disk_gb=200),
    data_disk_kind="hyperdisk-balanced",
)
PLACE = Place(ZONE, "spot", "sub1", "mig")
DELETED = {"instanceTerminationAction": "DELETE"}
INSTANCE = Place(ZONE, "on_demand", "sub1", "instance")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    google = SimpleNamespace(root=lambda api: f"https://{api}.googleapis.com/")
    return make_context(google, tmp_path, project="p1")


@pytest.mark.parametrize("tier", ["on_demand", "spot", "flex_start", "reserved"])
def test_every_tier_is_valid_by_the_discovery_document(context: Context, tier: str) -> None:
    spec = replace(SPEC, own=replace(vm_spec(SPEC), max_run_seconds=7200.0), reservation="mine")
    spec = replace(spec, heartbeat_timeout_seconds=7200.0)
    place = replace(PLACE, capacity=tier)
    one = bodies.instance_body(context, "pod", replace(spec, workers=1, data_disk_gb=100), place)
    template = bodies.template_body(context, "pod", spec, place)
    sent = {
        "Instance": one,
        "InstanceTemplate": template,
        "ResourcePolicy": bodies.policy_body("pod", spec),
        "InstanceGroupManager": bodies.group_body(context, "pod", spec, place, template["name"]),
    }
    validation = Validation(load_discovery())
    for schema, body in sent.items():
        validation.check_body(Method("compute.v1", "", "POST", schema, True, {}), body)
    assert ("reservationAffinity" in one) == (tier == "reserved")
    assert ("params" in one) == (tier == "flex_start")


@pytest.mark.parametrize(
    ("tier", "limit", "wanted"),
    [
        ("on_demand", None, {"provisioningModel": "STANDARD"}),
        (
            "on_demand", 7200.0,
            {"provisioningModel": "STANDARD", "maxRunDuration": {"seconds": "7200"}, **DELETED},
        ),
        (
            "spot", None,
            {"provisioningModel": "SPOT", "automaticRestart": False, "preemptionNoticeDuration": {"seconds": "120"},
             **DELETED},
        ),
        ("reserved", None, {"provisioningModel": "RESERVATION_BOUND", **DELETED}),
        (
            "flex_start", 60.0,
            {"provisioningModel": "FLEX_START", "maxRunDuration": {"seconds": "600"}, **DELETED},
        ),
    ],
)  # fmt: skip
def test_the_tier_and_the_end_of_a_vm(tier: str, limit: float | None, wanted: dict[str, Any]) -> None:
    found = bodies.scheduling(VmSpec(max_run_seconds=limit), tier)
    assert found == {"onHostMaintenance": "TERMINATE", **wanted}


def test_a_group_is_made_empty_in_bulk_mode_with_the_full_url_of_its_policy(context: Context) -> None:
    body = bodies.group_body(context, "pod", SPEC, PLACE, "pod-12345678")
    region = "https://compute.googleapis.com/compute/v1/projects/p1/regions/us-east5"
    assert (body["targetSize"], body["targetSizePolicy"]) == (0, {"mode": "BULK"})
    assert body["resourcePolicies"] == {"workloadPolicy": f"{region}/resourcePolicies/pod-2x4"}
    assert body["instanceLifecyclePolicy"] == {"defaultActionOnFailure": "DO_NOTHING"}


def test_a_template_is_named_by_its_content_and_names_fit(context: Context) -> None:
    name = "p" * 63
    first, again = (bodies.template_body(context, name, SPEC, PLACE)["name"] for _ in range(2))
    larger = replace(SPEC, own=replace(vm_spec(SPEC), boot_disk_gb=300))
    assert first == again != bodies.template_body(context, name, larger, PLACE)["name"]
    assert len(first) == 63
    group = bodies.group_body(context, name, SPEC, PLACE, first)
    assert len(group["baseInstanceName"]) <= 58
    assert len(bodies.policy_name(name, replace(SPEC, own=VmSpec(shape="16x24x24")))) <= 63


def test_vms_boot_as_google_needs_it(context: Context) -> None:
    properties = bodies.vm_properties(context, "pod", SPEC, PLACE)
    boot = properties["disks"][0]["initializeParams"]
    assert (boot["diskSizeGb"], boot["diskType"]) == ("200", "hyperdisk-balanced")
    family = "projects/ubuntu-os-accelerator-images/global/images/family/"
    assert boot["sourceImage"] == f"{family}ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
    assert properties["serviceAccounts"][0]["scopes"] == ["https://www.googleapis.com/auth/cloud-platform"]
    assert "accessConfigs" not in properties["networkInterfaces"][0]
    items = {item["key"]: item["value"] for item in properties["metadata"]["items"]}
    assert items["enable-guest-attributes"] == "TRUE"
    assert items["ssh-keys"].startswith("me:ssh-ed25519 ")
    own = bodies.vm_properties(context, "pod", replace(SPEC, runtime_version="projects/x/global/images/y"), PLACE)
    assert own["disks"][0]["initializeParams"]["sourceImage"] == "projects/x/global/images/y"


def test_a_pod_that_nobody_uses_deletes_its_group_and_not_a_vm_of_it(context: Context) -> None:
    properties = bodies.vm_properties(context, "pod", replace(SPEC, heartbeat_timeout_seconds=7200.0), PLACE)
    [script] = [item["value"] for item in properties["metadata"]["items"] if item["key"] == "startup-script"]
    where = "https://compute.googleapis.com/compute/v1/projects/p1/zones/us-east5-b"
    assert f"7200 {where}/instanceGroupManagers/pod {where}/instances/pod <" in script


@pytest.mark.parametrize(("hours", "seconds"), [(None, "7200"), (0.001, "90"), (1.0, "3600"), (24.0, "7200")])
def test_a_flex_start_vm_waits_as_long_as_google_lets_it(context: Context, hours: float | None, seconds: str) -> None:
    spec = replace(SPEC, valid_until_seconds=None if hours is None else 3600 * hours)
    body = bodies.instance_body(context, "pod", spec, replace(INSTANCE, capacity="flex_start"))
    assert body["params"] == {"requestValidForDuration": {"seconds": seconds}}


def test_a_data_disk_is_attached_to_the_vm_and_outlives_it(context: Context) -> None:
    body = bodies.instance_body(context, "pod", replace(SPEC, data_disk_gb=100), INSTANCE)
    source = f"projects/p1/zones/{ZONE}/disks/pod-data"
    assert body["disks"][1] == {"source": source, "mode": "READ_WRITE", "boot": False, "autoDelete": False}
    assert body["disks"][0]["initializeParams"]["diskType"].endswith(f"zones/{ZONE}/diskTypes/hyperdisk-balanced")

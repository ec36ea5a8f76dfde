"""The quotas that the checks read are those that are enforced, in Google's words."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from controller.localcloud.apis.catalog import load_catalog
from controller.localcloud.apis.quotas import Quotas, _draws, check_limits, metric_names
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Store
from controller.resources.pod.refusals import classify
from tests.controller.localcloud.harness import COMPUTE, INSTANCES, NODES, PROJECT, REGION, ZONE, EmulatedCloud

CATALOG = load_catalog()


def quotas(tmp_path: Path, **limits: int) -> Quotas:
    return Quotas(Store(tmp_path / "state.db"), CATALOG, lambda: {k.replace("_", "-"): v for k, v in limits.items()})


def refusal(quotas: Quotas, kinds: list[str], tier: str) -> str:
    try:
        quotas.check_tpus(ZONE, [CATALOG.types[kind] for kind in kinds], tier)
    except ApiError as error:
        return (
            error.message if (error.code, classify(error.status, error.message)) == (429, "quota") else str(error.code)
        )
    return ""


def test_small_slices_of_v5e_draw_on_the_serving_quota(tmp_path: Path) -> None:
    mine = quotas(tmp_path, tpu_v5s_litepod=16, tpu_v5s_litepod_serving=4)
    assert refusal(mine, ["v5litepod-16"], "on_demand") == ""
    assert refusal(mine, ["v5litepod-4"], "on_demand") == ""
    words = f"Quota limit 'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 4 in zone {ZONE}."
    assert refusal(mine, ["v5litepod-8"], "on_demand") == words
    assert refusal(mine, ["v5litepod-4"] * 2, "on_demand") == words
    assert refusal(mine, ["v5litepod-8"], "spot") == ""
    spot = quotas(tmp_path, tpu_v6e_preemptible=0)
    assert "TPUV6EPreemptiblePerProject" in refusal(spot, ["v6e-1"], "preemptible")


def test_a_project_lists_what_is_enforced(tmp_path: Path) -> None:
    listed = {one["metric"]: one for one in quotas(tmp_path, tpu_v4s_preemptible=32).tpu_metrics()}
    assert [name.partition("/")[2] for name in listed] == metric_names()
    region, limit = listed["tpu.googleapis.com/tpu-v4s-preemptible"]["consumerQuotaLimits"]
    assert (region["unit"], limit["unit"]) == ("1/{project}/{region}", "1/{project}/{zone}")
    assert {b["dimensions"]["region"]: b["effectiveLimit"] for b in region["quotaBuckets"][1:]} == {
        "us-central2": "4096"
    }
    assert {b["dimensions"]["zone"]: b["effectiveLimit"] for b in limit["quotaBuckets"][1:]} == {"us-central2-b": "32"}


def test_a_node_must_be_within_the_quotas_of_zone_and_region(tmp_path: Path) -> None:
    none = quotas(tmp_path, tpu_v6e_preemptible_per_region=0)
    words = (
        "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 in region us-centra"
    )
    assert refusal(none, ["v6e-1"], "spot") == f"{words}l1."
    assert refusal(none, ["v6e-1"], "on_demand") == ""
    mine = quotas(tmp_path, tpu_v6e_per_region=8, tpu_v6e=4)
    for zone, kind in (("us-central1-b", "v6e-4"), ("us-east5-b", "v6e-8")):
        node = {"acceleratorType": kind, "name": f"{PROJECT}/locations/{zone}/nodes/other", "state": "READY"}
        mine.store.put("node", node["name"], node)
    assert refusal(mine, ["v6e-4"], "on_demand") == ""
    both = "TPUV6EPerProjectPerRegionForTPUAPI,TPUV6EPerProjectPerZoneForTPUAPI"
    words = f"Quota limit '{both}' has been exceeded. Limit: 8,4 in region {REGION},zone {ZONE}."
    assert refusal(mine, ["v6e-8"], "on_demand") == words


def test_the_usage_of_a_region_is_shown_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    store = Store(tmp_path / "state.db")
    mine = Quotas(store, CATALOG, dict, lambda: 60.0)

    def shown() -> float:
        return next(one["usage"] for one in mine.compute_quotas(REGION) if one["metric"] == "INSTANCES")

    assert shown() == 1
    store.put("compute", f"projects/slipway-local/zones/{ZONE}/instances/vm", {})
    now[0] = 1059.0
    assert shown() == 1
    assert mine.exhausted_in(REGION) is None
    now[0] = 1060.0
    assert shown() == 2


def test_compute_engine_has_pools_of_its_own_by_region(tmp_path: Path) -> None:
    mine = Quotas(Store(tmp_path / "state.db"), CATALOG, lambda: {"tpus-per-tpu-family-ct6e": 8})
    listed = {one["metric"]: one["consumerQuotaLimits"][0]["quotaBuckets"] for one in mine.pool_metrics()}
    names = ["tpus_per_tpu_family", "preemptible_tpu_v5p", "preemptible_tpu_v6e", "preemptible_tpu_7x"]
    assert list(listed) == [f"compute.googleapis.com/{name}" for name in names]
    family = [one for one in listed["compute.googleapis.com/tpus_per_tpu_family"] if one["effectiveLimit"] == "8"]
    assert {one["dimensions"]["tpu_family"] for one in family} == {"CT6E"}
    assert {"region": REGION} in [one["dimensions"] for one in listed["compute.googleapis.com/preemptible_tpu_v6e"]]


def limits(cloud: EmulatedCloud, **named: int) -> AbstractContextManager[None]:
    return cloud.settings(quotas={**cloud.call_ok("GET", "emulator/settings")["quotas"], **named})


def test_a_node_without_addresses_left_fails(cloud: EmulatedCloud, net: str) -> None:
    body = cloud.node_body(net, "v5litepod-16")
    body["networkConfig"]["enableExternalIps"] = True
    with limits(cloud, IN_USE_ADDRESSES=4):
        error = cloud.call_and_wait("POST", f"{NODES}?nodeId=outside", body)["error"]
        region = cloud.call_ok("GET", f"{COMPUTE}/regions/{REGION}")
    assert (error["code"], error["message"][:40]) == (8, "You have reached IN_USE_ADDRESSES limit.")
    assert classify("RESOURCE_EXHAUSTED", error["message"]) == "compute_quota"
    assert {"metric": "IN_USE_ADDRESSES", "limit": 4.0, "usage": 1.0} in region["quotas"], "somebody else's"


def test_a_vm_without_instances_left_is_refused(cloud: EmulatedCloud, net: str) -> None:
    """test_queued.py: what a queued request does then."""
    body = {"name": "vm", "machineType": "zones/z/machineTypes/e2-small", "networkInterfaces": [{"network": net}]}
    with limits(cloud, INSTANCES=0):
        message = cloud.refused("POST", INSTANCES, body, 403, "quotaExceeded")
    assert message == f"Quota 'INSTANCES' exceeded.  Limit: 0.0 in region {REGION}."


@pytest.mark.parametrize(
    ("limit", "body", "where"),
    [
        ({"E2_CPUS": 2}, {"machineType": "zones/z/machineTypes/e2-small"}, f"in region {REGION}"),
        ({"CPUS": 4}, {"machineType": "zones/z/machineTypes/n1-standard-4"}, f"in region {REGION}"),
        ({"CPUS_ALL_REGIONS": 2}, {"machineType": "zones/z/machineTypes/e2-medium"}, "globally"),
        (
            {"SSD_TOTAL_GB": 50},
            {
                "machineType": "zones/z/machineTypes/e2-small",
                "disks": [{"initializeParams": {"diskSizeGb": "50", "diskType": "zones/z/diskTypes/pd-balanced"}}],
            },
            f"in region {REGION}",
        ),
    ],
    ids=lambda value: str(*value) if isinstance(value, dict) and len(value) == 1 else "",
)
def test_a_vm_without_cpus_or_disks_left_is_refused(
    cloud: EmulatedCloud, net: str, limit: dict[str, int], body: dict[str, Any], where: str
) -> None:
    """One of each is somebody else's."""
    [(name, number)] = limit.items()
    with limits(cloud, **limit):
        body = {"name": "vm", **body, "networkInterfaces": [{"network": net}]}
        message = cloud.refused("POST", INSTANCES, body, 403, "quotaExceeded")
        project, region = (cloud.call_ok("GET", path) for path in (COMPUTE, f"{COMPUTE}/regions/{REGION}"))
    assert message == f"Quota '{name}' exceeded.  Limit: {float(number)} {where}."
    assert classify("403", message) == "compute_quota"
    shown = {quota["metric"]: quota["usage"] for quota in (*project["quotas"], *region["quotas"])}
    assert shown[name] == 1.0


def test_a_disk_of_its_own_draws_on_the_quota_of_its_type(cloud: EmulatedCloud) -> None:
    body = {"name": "disk", "sizeGb": "50", "type": f"{PROJECT}/zones/{ZONE}/diskTypes/hyperdisk-balanced"}
    with limits(cloud, HDB_TOTAL_GB=50):
        cloud.refused("POST", f"{COMPUTE}/zones/{ZONE}/disks", body, 403, "quotaExceeded")
        cloud.call_and_wait("POST", f"{COMPUTE}/zones/{ZONE}/disks", {**body, "sizeGb": "49"})
    cloud.call_and_wait("DELETE", f"{COMPUTE}/zones/{ZONE}/disks/disk")


def test_vms_with_tpus_draw_on_no_quota_of_cpus() -> None:
    drawn = _draws("instances", {"machineType": "zones/z/machineTypes/ct6e-standard-8t"})
    assert +drawn == {"INSTANCES": 1}


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"TPUV6": 4}, "the emulated project has no quota 'TPUV6'; closest: tpu-v6e, "),
        (
            {"PREEMPTIBLE_TPU_V6E": 4},
            "the emulated project has no quota 'PREEMPTIBLE_TPU_V6E'; closest: preemptible-tpu-",
        ),
        ({"!": 4}, "the emulated project has no quota '!'; known: INSTANCES, "),
        ({"CPUS": -1}, "CPUS must be a whole number of at least 0, not -1"),
        ([3], "must be limits by name; known: INSTANCES, "),
    ],
)
def test_a_quota_that_is_none_is_told_with_the_nearest(limits: object, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_limits(limits)
    assert str(refused.value).startswith(f"cloud.quotas: {said}")
    check_limits({"INSTANCES": 24, "tpu-v6e": 0})

"""Quotas of TPUs and of Compute Engine: what a run needs of them, what others use, and what the run has already."""

from typing import Any

import pytest

from tests.controller.checks.test_probes import ON_CE, OWN, REFUSED, SAMPLERS, quota, words


def both_quotas(training: int, serving: int) -> dict[str, Any]:
    found = [quota(training), quota(serving, metric="tpu-v5s-litepod-serving")]
    return {"services.consumerQuotaMetrics.list": {"metrics": [f.popitem()[1]["metrics"][0] for f in found]}}


def test_small_v5e_slices_draw_on_the_serving_quota() -> None:
    small = ("tpu=v5litepod_8", "tpu.zone=us-central1-a")
    assert words(both_quotas(16, 8), *small) == []
    [warning] = words(both_quotas(16, 4), *small)
    assert warning.startswith("quota: warning tpu.zone: v5litepod-8 on_demand draws on the serving quota in us-central")
    assert words(both_quotas(4, 4), *small)[0].startswith("quota: error tpu.zone: no v5litepod-8 on_demand")
    assert words(both_quotas(0, 8), *small) == []
    assert words(both_quotas(0, 64))[0].startswith("quota: error tpu.zone: no v5litepod-16 on_demand")


def by_place(zone: int, region: int, *more: dict[str, Any], metric: str = "tpu-v5s-litepod") -> dict[str, Any]:
    """Return the limits of a metric in all zones and in all regions, then further ones of regions."""
    limits = [
        {"unit": "1/{project}/{zone}", "quotaBuckets": [{"effectiveLimit": str(zone)}]},
        {"unit": "1/{project}/{region}", "quotaBuckets": [{"effectiveLimit": str(region)}, *more]},
        {"unit": "1/{project}", "quotaBuckets": [{"effectiveLimit": "1"}]},
    ]
    listed = {"metric": f"tpu.googleapis.com/{metric}", "consumerQuotaLimits": limits}
    return {"services.consumerQuotaMetrics.list": {"metrics": [listed]}}


def test_the_quota_of_a_region_binds_beside_that_of_the_zone() -> None:
    assert words(by_place(16, 16)) == []
    [error] = words(by_place(16, 0))
    said = "quota: error tpu.zone: no v5litepod-16 on_demand quota in us-central1-a: the limit is 0 in all of us-cent"
    assert error.startswith(f"{said}ral1, and 16 are needed")
    [error] = words(by_place(8, 16))
    assert "quota in us-central1-a: the limit is 8, and 16 are needed" in error
    here = {"dimensions": {"region": "us-central1"}, "effectiveLimit": "-1"}
    assert words(by_place(16, 0, here)) == []
    [warning] = words(by_place(64, 31) | nodes(node("x", zone="us-central1-c")))
    assert warning.endswith("a quota of 31 in us-central1, and other pods of the project hold 16 of it; 16 are needed")
    assert words(by_place(64, 32) | nodes(node("x", zone="us-central1-c"), node("y", zone="us-west4-a"))) == []


def test_quotas_are_for_all_slices_of_a_run() -> None:
    grpo = [*SAMPLERS, "program=trainer", "program.command=[]", "tpu=v5litepod_8", "tpu.zone=us-central1-a"]
    assert words(both_quotas(32, 32), *grpo) == []
    [error] = words(both_quotas(31, 31), *grpo)
    said = "quota: error loop.sampler.pods: with the pods of samplers: no v5litepod-8 on_demand quota in us-central1-a"
    assert error.startswith(f"{said}: the limit is 31, and 32 are needed")
    small = [*grpo, "loop.sampler.tpu=v5litepod-1"]
    assert words(both_quotas(11, 11), *small) == []
    assert words(both_quotas(10, 10), *small)[0].startswith("quota: error loop.sampler.pods: with the pods of samplers")
    [error] = words(compute_quotas(INSTANCES=3), *grpo)
    assert "v5litepod-8 with 3 pods of v5litepod-8 needs 4 of Compute quota INSTANCES" in error


def compute_quotas(used: float = 0.0, **limits: int) -> dict[str, Any]:
    return {"regions.get": {"quotas": [{"metric": m, "limit": float(n), "usage": used} for m, n in limits.items()]}}


def node(name: str, kind: str = "v5litepod-16", zone: str = "us-central1-a", workers: int = 4, **more: Any) -> Any:
    """Return an answer of `nodes.list`; `spot=True` for the tier."""
    tier = {"schedulingConfig": {"spot": True}} if more.pop("spot", False) else {}
    path = f"projects/acme/locations/{zone}/nodes/{name}"
    ends = [{"ipAddress": f"10.0.0.{i}"} for i in range(workers)]
    return {"name": path, "acceleratorType": kind, "state": "READY", "networkEndpoints": ends, **tier, **more}


def nodes(*found: Any) -> dict[str, Any]:
    return {"projects.locations.nodes.list": {"nodes": list(found)}}


BASTION = ("recovery.driver=bastion", "network.nat=false", "tpu.external_ip=true")
SMALL = "recovery.driver=bastion"


def all_cpus(limit: int, used: float = 0.0) -> dict[str, Any]:
    return {"projects.get": {"quotas": [{"metric": "CPUS_ALL_REGIONS", "limit": float(limit), "usage": used}]}}


@pytest.mark.parametrize(
    ("answers", "overrides", "said"),
    [
        (
            compute_quotas(E2_CPUS=1, CPUS=24),
            [SMALL],
            "error tpu.external_ip: the bastion (e2-small) needs 2 of Compute",
        ),
        (compute_quotas(E2_CPUS=24, CPUS=0), [SMALL], None),
        (compute_quotas(CPUS=0), [SMALL], "needs 2 of Compute quota CPUS in us-central1, which is 0"),
        (compute_quotas(25, E2_CPUS=24), [SMALL], "others use 23 of it"),  # two are the bastion's that runs
        (compute_quotas(24, E2_CPUS=24), [SMALL], None),
        (compute_quotas(N2_CPUS=1), [SMALL, "cloud.driver_machine=n2-standard-2"], "2 of Compute quota N2_CPUS"),
        (compute_quotas(CPUS=0), [SMALL, "cloud.driver_machine=n2-standard-2"], None),
        (compute_quotas(CPUS=0), [SMALL, "cloud.driver_machine=g1-small"], "2 of Compute quota CPUS in us-c"),
        (compute_quotas(CPUS=0, E2_CPUS=0), [], None),  # those of TPUs draw on none
        (all_cpus(1), [SMALL], "2 of Compute quota CPUS_ALL_REGIONS in all regions, which is 1; choose a smaller"),
        (all_cpus(12, 12.0), [SMALL], None),
        (all_cpus(12, 13.0), [SMALL], "others use 11 of it"),
        (all_cpus(0), [], None),
        (
            compute_quotas(HDB_TOTAL_GB=199),
            [*ON_CE, "tpu.boot_disk_gb=200"],
            "error tpu.external_ip: v6e-8 needs 200 of",
        ),
        (compute_quotas(HDB_TOTAL_GB=200), [*ON_CE, "tpu.boot_disk_gb=200"], None),
        (compute_quotas(HDB_TOTAL_GB=199), ["tpu=v6e_8", "tpu.zone=us-east5-b", "tpu.plane=auto"], "warning tpu.ext"),
        (compute_quotas(HDB_TOTAL_GB=0), ["tpu=v6e_8", "tpu.zone=us-east5-b", "tpu.plane=tpu_api"], None),
        (
            compute_quotas(SSD_TOTAL_GB=500),
            ["tpu.data_disk_gb=501", "tpu=v5litepod_8"],
            "501 of Compute quota SSD_TOTAL",
        ),
        (compute_quotas(SSD_TOTAL_GB=0), [], None),
    ],
)
def test_the_bastion_takes_cpus_and_vms_of_compute_engine_take_disks(
    answers: dict[str, Any], overrides: list[str], said: str | None
) -> None:
    here = {"machineTypes.get": {"guestCpus": 2}, "instances.get": {"networkInterfaces": [{}]}}
    found = [line for line in words(here | answers, *overrides) if line.startswith("compute_quota")]
    assert len(found) == (said is not None), found
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("answers", "overrides", "said"),
    [
        (compute_quotas(4, INSTANCES=8), [], None),
        (compute_quotas(5, INSTANCES=8), [], "is 8, and others use 5 of it; request more"),
        (compute_quotas(5, INSTANCES=8) | nodes(node("mine")), [OWN], None),
        (compute_quotas(9, INSTANCES=8) | nodes(node("mine")), [OWN], "others use 5"),
        (compute_quotas(5, INSTANCES=8) | nodes(node("mine", state="PREEMPTED")), [OWN], "others use 5"),
        (compute_quotas(5, INSTANCES=8) | nodes(node("mine", zone="us-west4-a")), [OWN], "others use 5"),
        (compute_quotas(5, INSTANCES=8) | nodes(node("minerva")), [OWN], "others use 5"),
        (
            compute_quotas(2, IN_USE_ADDRESSES=5),
            ["tpu.external_ip=true"],
            "others use 2 of it; set tpu.external_ip=false",
        ),
        (compute_quotas(0, IN_USE_ADDRESSES=4), BASTION, "needs 5 of Compute quota IN_USE_ADDRESSES"),
        (compute_quotas(1, IN_USE_ADDRESSES=5), BASTION, None),  # the bastion that runs
        (compute_quotas(1, IN_USE_ADDRESSES=5), [*BASTION, "network.nat=true"], None),
    ],
)
def test_what_others_use_of_a_region_and_what_the_run_has_already(
    answers: dict[str, Any], overrides: list[str], said: str | None
) -> None:
    running = {"instances.get": {"networkInterfaces": [{"accessConfigs": [{"natIP": "192.0.2.1"}]}]}}
    found = [line for line in words(running | answers, *overrides) if line.startswith("compute_quota")]
    assert len(found) == (said is not None), found
    assert said is None or said in found[0]


def vm(name: str, model: str = "STANDARD", status: str = "RUNNING") -> dict[str, Any]:
    """Return one of 4 chips of v6e."""
    machine = "zones/us-east5-b/machineTypes/ct6e-standard-4t"
    return {"name": name, "status": status, "machineType": machine, "scheduling": {"provisioningModel": model}}


def vms(*found: dict[str, Any]) -> dict[str, Any]:
    return {"instances.aggregatedList": {"items": {"zones/us-east5-b": {"instances": list(found)}}}}


def pool(limit: int, preemptible: bool = False) -> dict[str, Any]:
    dimensions = {"region": "us-east5"} if preemptible else {"region": "us-east5", "tpu_family": "CT6E"}
    name = "preemptible_tpu_v6e" if preemptible else "tpus_per_tpu_family"
    bucket = {"dimensions": dimensions, "effectiveLimit": str(limit)}
    metric = {"metric": f"compute.googleapis.com/{name}", "consumerQuotaLimits": [{"quotaBuckets": [bucket]}]}
    return {"services.consumerQuotaMetrics.list": {"metrics": [metric]}}


REQUEST = {
    "name": "projects/acme/locations/us-central1-a/queuedResources/q", "state": {"state": "WAITING_FOR_RESOURCES"},
    "guaranteed": {}, "tpu": {"nodeSpec": [{"node": {"acceleratorType": "v5litepod-16"}}]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "overrides", "said"),
    [
        (quota(32) | nodes(node("x")), [], None),
        (
            quota(31) | nodes(node("x")),
            [],
            "draws on a quota of 31 in us-central1-a, and other pods of the project hold 16",
        ),
        (quota(31) | nodes(node("mine-2")), [OWN], None),  # of a sweep
        (quota(31) | nodes(node("x", spot=True)), [], None),
        (quota(31) | nodes(node("x", zone="us-west4-a")), [], None),
        (quota(31) | nodes(node("x", state="DELETING")), [], None),
        (quota(31) | nodes(node("x", "v5litepod-8")), [], None),  # of the serving quota
        (quota(31) | {"projects.locations.queuedResources.list": {"queuedResources": [REQUEST]}}, [], "hold 16"),
        (both_quotas(16, 15) | nodes(node("x", "v5litepod-8")), ["tpu=v5litepod_8"], "a quota of 15"),
        (
            quota(31, metric="tpu-v5s-litepod-preemptible") | nodes(node("x", spot=True)),
            ["tpu.capacity=spot"],
            "hold 16",
        ),
        (pool(11) | vms(vm("x")), ON_CE, "which is 11, and other VMs of the project hold 4 of it; 8 are needed"),
        (pool(12) | vms(vm("x")), ON_CE, None),
        (pool(11) | vms(vm("mine-a1b2"), vm("y", "SPOT"), vm("z", status="TERMINATED")), ON_CE, None),
        (pool(11, preemptible=True) | vms(vm("x", "SPOT")), (*ON_CE, "tpu.capacity=spot"), "hold 4"),
    ],
)
def test_what_others_hold_of_a_quota_of_tpus(answers: Any, overrides: Any, said: str | None) -> None:
    place = ["tpu.zone=us-central1-a"] if overrides is not ON_CE else []
    found = [line for line in words(answers, *place, *overrides) if line.startswith("quota: ")]
    assert len(found) == (said is not None), found
    assert said is None or (said in found[0] and found[0].startswith("quota: warning"))


def test_each_worker_takes_a_vm_and_an_address_of_the_region() -> None:
    external = "tpu.external_ip=true"
    assert words(compute_quotas(IN_USE_ADDRESSES=4, INSTANCES=4), external) == []
    [error] = words(compute_quotas(IN_USE_ADDRESSES=3), external)
    assert error.startswith(
        "compute_quota: error tpu.external_ip: v5litepod-16 needs 4 of Compute quota IN_USE_ADDRESSES"
    )
    assert words(compute_quotas(IN_USE_ADDRESSES=0), "tpu.external_ip=false") == []
    [error] = words(compute_quotas(INSTANCES=4), "recovery.driver=bastion")
    assert "needs 5 of Compute quota INSTANCES in us-central1, which is 4" in error
    elsewhere = words(compute_quotas(INSTANCES=3), "tpu.fallback_zones=[us-west4-a]")
    assert [line.split()[1] for line in elsewhere if line.startswith("compute_quota")] == ["warning", "warning"]
    [unknown] = words({"regions.get": REFUSED})
    assert unknown.startswith("compute_quota: warning cloud.project: compute quota was not checked: permission denied")

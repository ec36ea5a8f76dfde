"""Capacity: slices, zones, subnets and buckets judged without a cloud, and against Google's own lists."""

from types import SimpleNamespace
from typing import cast

import pytest

from conf.schema.config import Config
from controller.checks import capacity
from controller.checks.preflight import checks_of
from controller.context import Context
from controller.core.finding import Finding
from controller.resources.pod.tpu_api.offers import is_certainly_missing
from tests.controller.checks.plans import config
from tests.controller.checks.test_probes import Answers


def composed(*overrides: str) -> Config:
    return config("program=command", *overrides)


def offline(of: Config) -> list[str]:
    return [f"{f.severity} {f}" for check in checks_of(capacity) if not check.rule.live for f in check(of)]


def findings(*overrides: str) -> list[str]:
    return offline(composed(*overrides))


def in_zones(*overrides: str, zones: tuple[str, ...] = ()) -> list[str]:
    found = composed("cloud=local", *overrides)
    return offline(found.model_copy(update={"tpu": found.tpu.model_copy(update={"fallback_zones": zones})}))


def v6e(*overrides: str) -> Config:
    return composed("tpu=v6e_8", "tpu.plane=tpu_api", *overrides)


def asked(of: Config, **lists: list[str]) -> list[Finding]:
    """What is found where Google lists these names, by collection."""
    listed = {items: [{"name": f"projects/p/{items}/{name}"} for name in names] for items, names in lists.items()}
    google = Answers({f"projects.locations.{items}.list": {items: found} for items, found in listed.items()})
    context = cast(Context, SimpleNamespace(project="p", google=google))
    return [finding for check in checks_of(capacity) if check.rule.live for finding in check(of, context)]


TPU_API = ("tpu=v6e_8", "tpu.plane=tpu_api")


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["tpu.zone=us-central1-b"], "warning tpu.zone: us-central1-b has no v5e; zones that have it: asia-east1-a"),
        (["tpu.zone=us-central1-z"], "warning tpu.zone: us-central1-z has no v5e"),  # the region is known
        (["tpu.fallback_zones=[us-central1-b]"], "warning tpu.fallback_zones: us-central1-b has no v5e"),
        (["tpu.zone=us-moon1-a"], "error tpu.zone: us-moon1-a has no v5e"),
        (["cloud=local", "tpu.zone=us-central1-b"], "error tpu.zone: us-central1-b has no v5e"),
        (["tpu.accelerator_type=tpu7x-8", "tpu.plane=tpu_api"], "error tpu.plane: the TPU API has no tpu7x; set it to"),
        (["tpu.plane=compute_engine"], "error tpu.plane: Compute Engine has no v5e; set it to auto or tpu_api"),
        (["tpu=tpu7x_16", "tpu.accelerator_type=tpu7x-2"], "error tpu.accelerator_type: Compute Engine has no VM type"),
        (["tpu=v6e_8_ce", "tpu.capacity=flex_start"], "error tpu.max_run_hours: flex_start needs a duration"),
        (["tpu=v6e_8_ce", "tpu.capacity=flex_start", "budget.max_hours=200"], "error tpu.max_run_hours: Google ends a"),
        (["tpu=v6e_8_ce", "tpu.capacity=preemptible"], "error tpu.capacity: Compute Engine has no preemptible TPUs"),
        (["tpu=v6e_8_ce", "tpu.capacity=reserved"], "error tpu.reservation: tpu.capacity=reserved needs the name"),
        (["tpu=v6e_8_ce", "tpu.provisioner=queued"], "error tpu.provisioner: queued is a way of the TPU API"),
        (
            ["tpu=v6e_8_ce", "tpu.runtime_version=ubuntu-accel-2404-amd64-tpu-tpu7x"],
            "error tpu.runtime_version: ubuntu-accel-2404-amd64-tpu-tpu7x is an image for tpu7x, not for v6e; use ",
        ),
        (["tpu=v6e_8_ce", "tpu.runtime_version=v2-alpha-tpuv6e"], "error tpu.runtime_version: v2-alpha-tpuv6e is an"),
        ([*TPU_API, "tpu.machine_type=ct6e-standard-4t"], "error tpu.machine_type: the TPU API chooses the VMs"),
        ([*TPU_API, "tpu.max_run_hours=4"], "error tpu.max_run_hours: only Compute Engine ends a pod by itself"),
        ([*TPU_API, "tpu.runtime_version=projects/p/global/images/i"], "error tpu.runtime_version: projects/p/global/"),
        (["tpu=tpu7x_16", "tpu.provisioner=queued"], "error tpu.provisioner: queued is a way of the TPU API"),
        (["tpu=v6e_8", "tpu.provisioner=queued", "tpu.capacity=preemptible"], "error tpu.capacity: queued resources"),
        (["tpu.accelerator_type=tpu7x-2", "tpu.zone=us-central1-c"], "error tpu.plane: the TPU API has no tpu7x"),
        (["tpu.capacity=flex_start", "tpu.provisioner=node"], "error tpu.provisioner: flex_start needs a queued"),
        (["tpu.capacity=[on_demand,preemptible]", "tpu.provisioner=queued"], "error tpu.capacity: queued resources"),
        (["tpu.capacity=reserved"], "error tpu.reservation: tpu.capacity=reserved needs the name"),
        (["tpu.adopt=true"], "error tpu.name: tpu.adopt=true needs the name of the existing pod"),
        (["tpu.data_disk_gb=100"], "error tpu.data_disk_gb: a writable disk attaches to one VM only"),
        (["tpu.runtime_version=tpu-ubuntu2204-base"], "warning tpu.runtime_version: tpu-ubuntu2204-base is not the"),
    ],
)
def test_a_slice_that_google_refuses_names_its_key(overrides: list[str], start: str) -> None:
    assert [line for line in findings(*overrides) if line.startswith(start)]


@pytest.mark.parametrize(
    "overrides",
    [
        ["tpu.capacity=[on_demand,spot]", "tpu.fallback_zones=[us-east1-b]", "cloud.bucket_location=us"],
        ["tpu.capacity=reserved", "tpu.reservation=mine"],
        ["tpu.capacity=preemptible"],
        ["tpu=v6e_8", "tpu.data_disk_gb=100"],
        ["tpu=v4_64", "tpu.adopt=true", "tpu.name=stable-1"],
    ],
)
def test_nothing_is_said_of_a_slice_that_google_makes(overrides: list[str]) -> None:
    assert findings(*overrides) == []


def test_nothing_is_said_of_regions_that_fit() -> None:
    assert in_zones() == []
    assert in_zones("cloud.bucket_location=us", zones=("us-west4-a",)) == []
    assert in_zones("cloud.bucket=mine", zones=("europe-west4-b",)) == []


@pytest.mark.parametrize(
    ("overrides", "zones", "said"),
    [
        (["tpu.zone=moon-base1-a"], (), "error network.cidr: conf/regions.yaml has no range for moon-base1"),
        (["network.cidr=10.9.0.0/20", "cloud.bucket_location=us"], ("us-west4-a",), "error network.cidr: one range ca"),
        ([], ("us-west4-a",), "error cloud.bucket_location: us-central1 does not serve us-west4"),
        (["cloud.bucket_location=us"], ("europe-west4-b",), "error cloud.bucket_location: us does not serve europe-we"),
        (["cloud.soft_delete_days=3"], (), "error cloud.soft_delete_days: must be 0 or 7 to 90"),
    ],
)
def test_regions_that_do_not_fit_name_their_key(overrides: list[str], zones: tuple[str, ...], said: str) -> None:
    assert [line for line in in_zones(*overrides, zones=zones) if line.startswith(said)]


def test_what_is_listed_is_offered_whatever_the_table_says() -> None:
    moved = v6e("tpu.zone=us-east1-c")  # the table knows no v6e there
    assert asked(moved, acceleratorTypes=["v6e-1", "v6e-8"], runtimeVersions=["v2-alpha-tpuv6e"]) == []


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (
            {"acceleratorTypes": ["v6e-1", "v6e-4"]},
            "tpu.zone: Google offers no v6e-8 in us-east5-b; closest there: v6e-4, v6e-1",
        ),
        (
            {"runtimeVersions": ["v2-alpha-tpuv6e", "tpu-ubuntu2204-base"]},
            "tpu.runtime_version: Google offers no image v2-alpha-tpuv6 in us-east5-b; closest there: v2-alpha-tpuv6e",
        ),
    ],
)
def test_what_is_not_listed_is_an_error_with_the_nearest(lists: dict[str, list[str]], words: str) -> None:
    [finding] = asked(v6e("tpu.runtime_version=v2-alpha-tpuv6"), **lists)
    assert (str(finding), finding.severity) == (words, "error")


def test_the_documented_image_may_be_missing_from_the_list() -> None:
    """Google's list is incomplete: it may lack v2-alpha-tpuv5-lite, the image of every v5e."""
    [finding] = asked(v6e(), runtimeVersions=["tpu-ubuntu2204-base"])
    assert (finding.key, finding.severity) == ("tpu.runtime_version", "note")
    assert "lacks v2-alpha-tpuv6e, the documented image" in str(finding)


def test_every_zone_is_asked_and_an_adopted_pod_is_not() -> None:
    zones = v6e("tpu.fallback_zones=[us-east5-a]")
    assert [f.key for f in asked(zones, acceleratorTypes=["v6e-1"])] == ["tpu.zone", "tpu.fallback_zones"]
    assert asked(v6e("tpu.adopt=true", "tpu.name=mine"), acceleratorTypes=["v6e-1"]) == []


def test_an_empty_list_says_nothing() -> None:
    assert not is_certainly_missing("v6e-8", frozenset())

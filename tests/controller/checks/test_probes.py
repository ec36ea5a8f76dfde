"""The checks that ask Google, and capacity judged without it, by hand-made answers; the emulated cloud passes all."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.schema.cloud import all_permissions
from conf.schema.config import Config
from controller.checks import capacity
from controller.checks.names import TUNNEL
from controller.checks.preflight import checks_of, probe_cloud
from controller.context import Context
from controller.core.finding import Finding
from controller.gcp.google_errors import ForbiddenError, NotFoundError, ServiceDisabledError
from controller.resources.pod.tpu_api import is_certainly_missing
from tests.composed import config_of as config
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context
from tests.fakes.google import Answers

GOOD: dict[str, Any] = {
    "projects.getBillingInfo": {"billingEnabled": True},
    "buckets.get": {"location": "US-CENTRAL1"},
    "projects.testIamPermissions": {"permissions": sorted(all_permissions())},
}
REFUSED = ForbiddenError("x", 403, "PERMISSION_DENIED", "no permission")

OF_MONEY = {"price", "endless", "trc_zone", "kept_forever", "thresholds", "trc_ended"}
ASKED = [check for check in checks_of(capacity) if check.rule.id not in OF_MONEY]


def words(answers: dict[str, Any], *overrides: str, has_credentials: bool = True) -> list[str]:
    base = ["cloud.project=acme", "program=command", "program.command=[a]", "tpu.capacity=on_demand"]
    google = Answers({**GOOD, **answers}, has_credentials)
    context = make_context(google, project="acme", clock=ManualClock(1_767_225_600.0))  # 2026-01-01
    return [f"{f.check}: {f.severity} {f}" for f in probe_cloud(config(*base, *overrides), context)]


def quota(limit: int, zone: str | None = "us-central1-a", metric: str = "tpu-v5s-litepod") -> dict[str, Any]:
    bucket = {"effectiveLimit": str(limit), **({"dimensions": {"zone": zone}} if zone else {})}
    limits = [{"unit": "1/{project}/{zone}", "quotaBuckets": [bucket]}]
    listed = [{"metric": f"tpu.googleapis.com/{metric}", "consumerQuotaLimits": limits}]
    return {"services.consumerQuotaMetrics.list": {"metrics": listed}}


SAMPLERS = ("+experiment=quickstart", "cloud=gcp", "loop.async_depth=1", "loop.sampler.pods=3")


def test_the_type_of_samplers_must_be_offered_too() -> None:
    grpo = [*SAMPLERS, "program=trainer", "program.command=[]", "tpu=v5litepod_8", "loop.sampler.tpu=v5litepod-1"]
    listed = {"projects.locations.acceleratorTypes.list": {"acceleratorTypes": [{"name": "projects/p/x/v5litepod-8"}]}}
    found = words(listed, *grpo)
    assert any(line.startswith("type_offered: error loop.sampler.tpu: ") for line in found), found


OWN = "tpu.name=mine"


ON_CE = ("tpu=v6e_8", "tpu.plane=compute_engine", "tpu.zone=us-east5-b", OWN)


V6E = ("tpu=v6e_8",)


def test_what_one_of_two_planes_refuses_is_a_warning_and_what_both_refuse_an_error() -> None:
    listing = {"projects.locations.nodes.list": REFUSED}
    [other] = [line for line in words(listing, *V6E) if "permission" in line]
    assert other.startswith("tpu_permission: warning tpu.zone: no permission to list TPUs in us-east5-b")
    both = [line for line in words(listing | {"instances.list": REFUSED}, *V6E) if line.startswith("tpu_perm")]
    assert [line.split()[1] for line in both] == ["error", "error"]
    assert "roles/compute.instanceAdmin.v1" in both[1]
    absent = {"machineTypes.get": NotFoundError("x", 404, "notFound", "no such machine")}
    assert "type_offered: warning tpu.zone: Compute Engine offers no ct6e" in "\n".join(words(absent, *V6E))
    hidden = {"machineTypes.get": REFUSED}
    assert "type_offered: warning tpu.zone: Compute Engine was not checked: " in "\n".join(words(hidden, *V6E))


def test_the_quota_of_each_plane_is_named() -> None:
    region = {"dimensions": {"region": "us-east5", "tpu_family": "CT6E"}, "effectiveLimit": "4"}
    pool = {"metric": "compute.googleapis.com/tpus_per_tpu_family", "consumerQuotaLimits": [{"quotaBuckets": [region]}]}
    metrics = quota(16, "us-east5-b", "tpu-v6e")["services.consumerQuotaMetrics.list"]["metrics"]
    found = words({"services.consumerQuotaMetrics.list": {"metrics": [*metrics, pool]}}, *V6E)
    short, enough = [line for line in found if line.startswith("quota")]
    assert enough == "quota: note tpu.zone: v6e-8 on_demand draws on the TPU API's quota in us-east5-b, which is 16"
    assert short.startswith("quota: warning tpu.zone: v6e-8 on_demand draws on Compute Engine's quota TPUS_PER_TPU_FAM")
    alone = words({"services.consumerQuotaMetrics.list": {"metrics": [pool]}}, *V6E, "tpu.plane=compute_engine")
    assert [line.split()[1] for line in alone if line.startswith("quota")] == ["error"]


def test_a_bastion_needs_a_machine_that_its_zone_has() -> None:
    absent = {"machineTypes.get": NotFoundError("x", 404, "notFound", "no such machine")}
    bastion = "recovery.driver=bastion"
    assert words(absent) == []
    [error] = words(absent, bastion, "cloud.driver_machine=e9-small")
    assert error.startswith("bastion_machine: error cloud.driver_machine: us-central1-a has no e9-small; use null, or")
    assert words({}, bastion) == []
    assert words({"machineTypes.get": REFUSED}, bastion) == []


NO_TUNNEL = {"projects.testIamPermissions": {"permissions": sorted(all_permissions() - {TUNNEL})}}
INSIDE = ["tpu.external_ip=false", "network.laptop=null"]


def bound(role: str, **more: Any) -> dict[str, Any]:
    return {"projects.getIamPolicy": {"bindings": [{"role": role, "members": ["user:you@example.com"], **more}]}}


ON_PORT_22 = {"condition": {"expression": "destination.port == 22"}}
OFF = ServiceDisabledError("x", 403, "PERMISSION_DENIED", "iap.googleapis.com is disabled")


@pytest.mark.parametrize(
    ("answers", "overrides", "severity"),
    [
        ({}, INSIDE, "error"),
        ({}, [*INSIDE, "tpu.plane=auto", *V6E], "error"),
        ({}, ["tpu.external_ip=true", "ssh.method=iap"], "error"),
        ({}, ["tpu.external_ip=true", "network.laptop=null"], "warning"),  # a rule may admit this machine
        ({}, ["tpu.external_ip=true", "network.laptop=auto"], None),
        ({"v1.testIamPermissions": {"permissions": [TUNNEL]}}, INSIDE, None),
        ({"v1.testIamPermissions": OFF}, INSIDE, "error"),
        ({"v1.testIamPermissions": REFUSED}, INSIDE, "warning"),
        ({"projects.getIamPolicy": REFUSED}, INSIDE, "warning"),
        (bound("roles/iap.tunnelResourceAccessor"), INSIDE, "error"),  # somebody else's
        (bound("roles/iap.tunnelResourceAccessor", **ON_PORT_22), INSIDE, "warning"),
        (bound("projects/p/roles/own", **ON_PORT_22), INSIDE, "warning"),
        (bound("roles/viewer", **ON_PORT_22), INSIDE, "error"),
    ],
)
def test_a_lack_of_iap_is_an_error_where_it_is_the_only_way_in(
    answers: dict[str, Any], overrides: list[str], severity: str | None
) -> None:
    found = [line for line in words(NO_TUNNEL | answers, *overrides) if TUNNEL in line]
    assert [line.split()[1] for line in found] == ([severity] if severity else [])
    assert all("--role=roles/iap.tunnelResourceAccessor" in line for line in found)


def test_what_is_right_is_not_commented_on() -> None:
    assert words({}) == []
    assert words(quota(16)) == []
    assert words(quota(-1, zone=None)) == []
    assert words(quota(0, metric="tpu-v6e")) == []  # of another generation
    assert words({"buckets.get": NotFoundError("x", 404, "notFound", "no such bucket")}) == []


@pytest.mark.parametrize(
    ("answers", "overrides", "said"),
    [
        (quota(8), [], "quota: error tpu.zone: no v5litepod-16 on_demand quota in us-central1-a: the limit is 8, and"),
        (
            quota(0, zone=None, metric="tpu-v5s-litepod-preemptible"),
            ["tpu.capacity=spot"],
            "quota: error tpu.zone: no ",
        ),
        ({"projects.getBillingInfo": {}}, [], "billing: error cloud.project: acme has no billing account"),
        ({"projects.locations.nodes.list": REFUSED}, [], "tpu_permission: error tpu.zone: no permission to list TPUs"),
        (
            {"buckets.get": REFUSED, "objects.list": REFUSED},
            ["cloud.bucket=acme-data"],
            "bucket_taken: error cloud.bucket: acme-data exists but you have no access",
        ),
        (
            {"buckets.get": {"location": "EUROPE-WEST4"}},
            ["cloud.bucket=acme-data"],
            "bucket_far: error cloud.bucket: acme-data is in europe-west4 and the TPU in us-central1, so reads",
        ),
        ({"services.consumerQuotaMetrics.list": REFUSED}, [], "quota: warning cloud.project: quota was not checked:"),
        (
            {},
            ["cloud.trc={zones: [us-central1-a], free_until: 2025-12-31}"],
            "trc_ended: warning cloud.trc.free_until: the grant ended on 2025-12-31",
        ),
        (
            {},
            ["cloud.trc={zones: [us-central1-a], free_until: 2026-01-02}"],
            "trc_ended: warning cloud.trc.free_until: the grant ends on 2026-01-02",
        ),
    ],
)
def test_what_is_wrong_names_its_key(answers: dict[str, Any], overrides: list[str], said: str) -> None:
    found = words(answers, *overrides)
    assert len(found) == 1
    assert found[0].startswith(said)


def test_without_credentials_only_that_is_said() -> None:
    [found] = words({}, has_credentials=False)
    assert found.startswith("credentials: warning cloud: no Google credentials")


def test_an_api_that_is_not_enabled_yet_is_no_finding() -> None:
    off = ServiceDisabledError("x", 403, "PERMISSION_DENIED", "tpu.googleapis.com is disabled")
    assert words({"projects.locations.nodes.list": off, "services.consumerQuotaMetrics.list": off}) == []


@pytest.mark.e2e
def test_the_emulated_cloud_satisfies_every_check(slipway: SlipwayCli) -> None:
    assert slipway.json("plan", ECHO_COMMAND)["findings"] == []
    calls = {request["call"] for request in slipway.cloud().requests()}
    assert {"projects.getBillingInfo", "services.consumerQuotaMetrics.list", "projects.locations.nodes.list"} <= calls


@pytest.mark.e2e
def test_an_error_stops_up_before_anything_is_made(slipway: SlipwayCli) -> None:
    fault = {"kind": "http", "status": 403, "match": "GET .*/locations/us-central1-a/nodes$", "times": 9}
    slipway.cloud().post("faults", {"key": "nodes", "faults": [fault]})
    code, _, err = slipway("up", ECHO_COMMAND)
    assert code == 2
    assert err.startswith("error: tpu.zone: no permission to list TPUs in us-central1-a")
    assert slipway.mutations() == []


def composed(*overrides: str) -> Config:
    return config("program=command", *overrides)


def offline(of: Config) -> list[str]:
    return [f"{f.severity} {f}" for check in ASKED if not check.rule.live for f in check(of)]


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
    return [finding for check in ASKED if check.rule.live for finding in check(of, context)]


TPU_API = ("tpu=v6e_8", "tpu.plane=tpu_api")


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["tpu.zone=us-central1-b"], "warning tpu.zone: us-central1-b has no v5e; zones that have it: asia-east1-a"),
        (["tpu.zone=us-central1-z"], "warning tpu.zone: slipway does not know us-central1-z (conf/tpu_types.yaml)"),
        (
            ["tpu.zone=us-moon1-a"],
            "error tpu.zone: slipway does not know us-moon1-a (conf/tpu_types.yaml); zones with v",
        ),
        (
            ["tpu.zone=us-west9-a"],
            "error tpu.zone: slipway does not know us-west9-a (conf/tpu_types.yaml); did you mean ",
        ),
        (["tpu.zone=us-moon1-a", "network.cidr=10.9.0.0/20"], "warning tpu.zone: slipway does not know us-moon1-a"),
        (["tpu.fallback_zones=[us-moon1-a]"], "error tpu.fallback_zones: slipway does not know us-moon1-a"),
        (["cloud=local", "tpu.zone=us-central1-ai9z"], "warning tpu.zone: slipway does not know us-central1-ai9z"),
        (["tpu.fallback_zones=[us-east5-z]"], "warning tpu.fallback_zones: slipway does not know us-east5-z"),
        (["tpu.fallback_zones=[us-central1-b]"], "warning tpu.fallback_zones: us-central1-b has no v5e"),
        (
            ["tpu=v6e_8", "tpu.zone=us-east1-d", "tpu.capacity=[spot,flex_start]"],
            "warning tpu.zone: Google names no flex_start of v6e in us-east1-d, so that it may wait in vain; zones "
            "that have it: asia-northeast1-b, ",
        ),
        (
            ["tpu.zone=us-west4-a", "tpu.fallback_zones=[us-west4-b]", "tpu.capacity=flex_start"],
            "warning tpu.fallback_zones: Google names no flex_start of v5e in us-west4-b",
        ),
        (
            ["tpu=tpu7x_16", "tpu.zone=us-central1-ai1a", "tpu.capacity=flex_start"],
            "warning tpu.zone: Google names no flex_start of tpu7x in us-central1-ai1a",
        ),
        (
            ["tpu=v4_8", "tpu.capacity=flex_start"],
            "warning tpu.zone: Google names no flex_start of v4 in us-central2-b",
        ),
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
        ["tpu.capacity=flex_start", "tpu.zone=us-west4-a"],
        ["tpu=v6e_8", "tpu.capacity=flex_start", "tpu.zone=us-east5-b"],
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
        (["tpu.zone=moon-base1-a"], (), "error tpu.zone: slipway does not know moon-base1-a (conf/tpu_types.yaml)"),
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
            "tpu.zone: Google offers no v6e-8 in us-east5-b; closest there: v6e-4, v6e-1; "
            "`gcloud compute tpus accelerator-types list --zone=us-east5-b` lists all",
        ),
        (
            {"runtimeVersions": ["v2-alpha-tpuv6e", "tpu-ubuntu2204-base"]},
            "tpu.runtime_version: Google offers no image v2-alpha-tpuv6 in us-east5-b; closest there: v2-alpha-tpuv6e; "
            "`gcloud compute tpus tpu-vm versions list --zone=us-east5-b` lists all",
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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "note tpu.runtime_version: Google has no image family ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e, the"),
        (("tpu.runtime_version=mine",), "error tpu.runtime_version: Google has no image family mine for TPUs; `gcloud"),
    ],
)
def test_an_image_family_that_google_lacks_is_an_error_unless_it_is_the_documented_one(
    overrides: tuple[str, ...], said: str
) -> None:
    missing = {"images.getFromFamily": NotFoundError("images.getFromFamily", 404, "notFound", "no")}
    found = [line for line in words(missing, *ON_CE, *overrides) if line.startswith("runtime_offered: ")]
    assert [line.startswith(f"runtime_offered: {said}") for line in found] == [True], found


def test_every_zone_is_asked_and_an_adopted_pod_is_not() -> None:
    zones = v6e("tpu.fallback_zones=[us-east5-a]")
    assert [f.key for f in asked(zones, acceleratorTypes=["v6e-1"])] == ["tpu.zone", "tpu.fallback_zones"]
    assert asked(v6e("tpu.adopt=true", "tpu.name=mine"), acceleratorTypes=["v6e-1"]) == []


def test_an_empty_list_says_nothing() -> None:
    assert not is_certainly_missing("v6e-8", frozenset())

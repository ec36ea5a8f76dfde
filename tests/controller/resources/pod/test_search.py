"""The search for room, on the emulated cloud: refused, asked again, elsewhere, waited for, given up."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.clock import InterruptedSleepError
from controller.core.errors import CloudError, RetriesExhaustedError
from controller.reconcile.resource import Diff, Pending
from controller.resources.pod.provisioner import NOT_OBSERVED, PodStatus
from tests.controller.localcloud.harness import wait_for
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.fake_pod import PROVISIONERS, TWO_ZONES, A, B, Pod, pod

INTERNAL = {"kind": "failure", "at": "operation", "code": 500, "message": "an internal error has occurred"}


@PROVISIONERS
def test_a_stock_out_and_an_internal_error_are_asked_again(project: EmulatedProject, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}")
    project.inject_fault(kind="stockout", times=2, at="request")
    project.inject_fault(**INTERNAL, times=1)
    assert made.up().status.state == "READY"
    assert len(made.creation_requests()) == 4
    assert "no capacity in us-central1-a (spot) (attempt 1)" in made.notes
    assert "an error at Google in us-central1-a (spot) (attempt 3)" in made.notes
    assert "retrying in" in made.notes
    made.down()
    project.inject_fault(**INTERNAL, times=99)
    with pytest.raises(CloudError, match=r"an internal error has occurred; try another tpu\.zone"):
        made.up()
    assert made.leftovers() == []


def test_pauses_double_and_are_spread(project: EmulatedProject) -> None:
    made = pod(project, "tpu.provisioner=node", max_create_attempts=4)
    project.context.random_float = lambda: 1.0
    project.clock.sleeps.clear()
    project.inject_fault(kind="stockout", times=4, at="request")
    with pytest.raises(RetriesExhaustedError, match=r"after 4 attempts; add zones to tpu\.fallback_zones"):
        made.up()
    assert project.clock.sleeps == [pytest.approx(0.01 * factor) for factor in (2, 4, 8)]
    assert made.leftovers() == []


FINAL: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "quota": ((), {"kind": "quota"}, r"Quota limit .* Limit: 0 in zone us-central1-a.*request quota at"),
    "permission": (
        TWO_ZONES,
        {"kind": "permission", "times": 9},
        r"denied on .*: you do not have roles/tpu\.admin, cl",
    ),
    "runtime": (("tpu.runtime_version=v2-alpha",), {}, r'version "v2-alpha" unknown.*set tpu\.runtime_version to null'),
    "late": ((), {"kind": "failure", "code": 400, "message": "Something broke"}, "Something broke"),
    "late quota": ((), {"kind": "quota", "at": "operation"}, "no quota for v5litepod-8"),
}
"""Overrides, a fault, and what is said."""


@PROVISIONERS
@pytest.mark.parametrize("why", FINAL)
def test_what_would_be_refused_again_is_asked_once_and_leaves_nothing(
    project: EmulatedProject, way: str, why: str
) -> None:
    words, fault, said = FINAL[why]
    made = pod(project, f"tpu.provisioner={way}", *words)
    if fault:
        project.inject_fault(**fault)
    with pytest.raises(CloudError, match=said) as refused:
        made.up()
    assert not isinstance(refused.value, RetriesExhaustedError)
    assert made.asked() == [f"{zone} spot" for zone in ((A, B) if words == TWO_ZONES else (A,))]
    assert made.leftovers() == []


@PROVISIONERS
def test_the_next_zone_is_asked_at_once(project: EmulatedProject, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}", *TWO_ZONES)
    project.inject_fault(kind="stockout", times=9, zone=A, at="request")
    assert made.up().place.zone == B
    assert made.asked() == [f"{A} spot", f"{B} spot"]
    assert f"requesting v5litepod-8 in {B} (spot)" in made.notes
    assert "retrying" not in made.notes
    assert made.up().place.zone == B  # found there, and left there
    assert made.node.pod_seen(project.context) == PodStatus("READY", health="HEALTHY")
    made.down()
    assert made.leftovers() == []


TIERS = ("tpu.provisioner=node", "tpu.capacity=[on_demand,spot]")
NODE, QUEUED = ("tpu.provisioner=node", *TWO_ZONES), ("tpu.provisioner=queued", *TWO_ZONES)
ON_DEMAND = {"capacity": "on_demand"}
ELSEWHERE: dict[str, tuple[tuple[str, ...], list[dict[str, Any]], list[str]]] = {
    "the next tier": (
        (*TIERS, *TWO_ZONES), [{"kind": "stockout", "times": 9, "at": "request"} | ON_DEMAND],
        [f"{A} on_demand", f"{A} spot"],
    ),
    "a quota rules its place out": (
        QUEUED,
        [{"kind": "quota", "zone": A, "times": 9}, {"kind": "stockout", "zone": B, "times": 1, "at": "request"}],
        [f"{A} spot", f"{B} spot", f"{B} spot"],
    ),
    "so does a permission": (NODE, [{"kind": "permission", "zone": A, "times": 9}], [f"{A} spot", f"{B} spot"]),
    "a zone that is closed to the project": (
        NODE,
        [{"kind": "http", "status": 403, "match": f"GET .*/locations/{A}/(nodes|queuedResources)/.*", "times": 999},
         {"kind": "permission", "zone": A, "times": 9}],
        [f"{A} spot", f"{B} spot"],
    ),
    # in the words of field reports
    "a type that is denied": (
        TIERS, [{"kind": "type_denied", "accelerator_type": "v5litepod-8"} | ON_DEMAND], [f"{A} on_demand", f"{A} spot"]
    ),
    "no reservation": (TIERS, [{"kind": "no_reservation"} | ON_DEMAND], [f"{A} on_demand", f"{A} spot"]),
    "an internal error": (TIERS, [{"kind": "internal"}], [f"{A} on_demand", f"{A} spot"]),
    "another type": (
        TIERS, [{"kind": "type_denied", "accelerator_type": "v6e-8", "times": 9}], [f"{A} on_demand"]
    ),
}  # fmt: skip
"""Overrides, faults, and every place that is asked; the last one has room."""


@pytest.mark.parametrize("why", ELSEWHERE)
def test_a_refusal_is_of_its_place(project: EmulatedProject, why: str) -> None:
    words, faults, asked = ELSEWHERE[why]
    made = pod(project, *words)
    for fault in faults:
        project.inject_fault(**fault)
    first = made.up()
    assert f"{first.place.zone} {first.place.capacity}" == asked[-1]
    assert made.up().status.uid == first.status.uid
    assert made.asked() == asked
    made.down()


def test_missing_rights_are_requested_once_and_waited_for(project: EmulatedProject) -> None:
    made = pod(project, "tpu.provisioner=node")
    message = "Make sure that 'service-1@cloud-tpu.iam.gserviceaccount.com' has the 'TPU Service Agent' role"
    project.inject_fault(kind="failure", at="request", code=403, message=message, times=3)
    message = "Service account x@y.iam.gserviceaccount.com does not exist."
    project.inject_fault(kind="failure", at="request", code=400, message=message, times=3)
    assert made.up().status.state == "READY"
    asked = [r["path"] for r in project.cloud.request_log() if r["path"].endswith(":generateServiceIdentity")]
    assert asked == [f"/tpu/v2/projects/slipway-local/locations/{A}:generateServiceIdentity"]
    assert "waiting until Google sees new rights" in made.notes
    made.down()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_request_that_waits_too_long_gives_way_to_the_next_zone(project: EmulatedProject, is_killed: bool) -> None:
    """Also where another controller, which was killed while it waited, has made it."""
    made = pod(project, "tpu.provisioner=queued", "tpu.create_timeout_minutes=0.005", *TWO_ZONES)
    project.inject_fault(kind="stockout", times=1000, zone=A)
    if is_killed:
        request(made)
        assert isinstance(made.observe(), Pending)
    assert made.up().place.zone == B
    assert is_killed or "still waiting for resources after" in made.notes
    assert made.leftovers() == [f"{B}/nodes/{made.node.name}", f"{B}/queuedResources/{made.node.name}"]
    made.down()


def request(made: Pod) -> None:
    """Send the request of a search that is killed right after it."""
    search = made.node._search(made.project.context)
    search.provisioners["queued"].create(made.project.context, search.name, made.node.spec, made.node.places[0])


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_a_dead_request_is_deleted_and_made_again(project: EmulatedProject, state: str) -> None:
    made = pod(project, "tpu.provisioner=queued")
    project.inject_fault(kind="queued", state=state, message="There is no more capacity")
    request(made)
    wait_for(lambda: getattr(made.observe(), "status", NOT_OBSERVED).state == state, f"the request is {state}")
    assert made.up().status.state == "READY"
    assert f"the node is {state.lower()}: deleting and recreating it" in made.notes
    made.down()


def test_an_expired_request_is_deleted(project: EmulatedProject) -> None:
    made = pod(project, "tpu.provisioner=queued", "tpu.valid_until_hours=0.00005", max_create_attempts=2)
    project.inject_fault(kind="stockout", times=100000)
    with pytest.raises(RetriesExhaustedError, match="no capacity"):
        made.up()
    assert len(made.creation_requests()) == 2
    assert made.leftovers() == []


def test_whoever_stops_waiting_is_told_that_the_request_stays(project: EmulatedProject) -> None:
    made = pod(project, "tpu.provisioner=queued")
    project.inject_fault(kind="stockout", times=100000)
    project.clock.interrupt_at = 3
    with pytest.raises(InterruptedSleepError):
        made.node.apply(project.context, {}, Diff("create"))
    assert "the request stays in the queue: `slipway up` resumes waiting, `slipway down` cancels it" in made.notes
    assert isinstance(made.observe(), Pending)
    made.down()


def test_flex_start_is_asked_for_through_the_newer_api(project: EmulatedProject) -> None:
    made = pod(project, "tpu.capacity=flex_start")
    assert made.up().place.capacity == "flex_start"
    [creation] = made.creation_requests()
    assert "/v2alpha1/" in creation["path"]
    assert creation["body"]["provisioningModel"] == "FLEX_START"
    assert made.up().status.state == "READY"
    made.down()
    assert made.leftovers() == []

"""The pod on the emulated cloud: searched for, made, lost, adopted, stopped, deleted."""

from dataclasses import replace
from typing import Any

import pytest

from controller.core.errors import CloudError, RetriesExhaustedError
from controller.gcp.google_errors import GoogleError
from controller.reconcile import Absent
from controller.resources.pod.planes import PLANES
from controller.resources.pod.provisioner import NOT_OBSERVED, PodStatus, SliceStatus
from controller.resources.pod.slices import hidden_place
from controller.resources.pod.tpu_nodes import parse_node
from tests.controller.localcloud.harness import wait_for
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.fake_pod import (
    EVERY_WAY,
    INSTANCE,
    LOST_STATES,
    PROVISIONERS,
    TWO_ZONES,
    A,
    B,
    Pod,
    pod,
)


@EVERY_WAY
def test_a_pod_is_made_once_replaced_when_it_is_preempted_and_deleted(
    project: EmulatedProject, words: tuple[str, ...]
) -> None:
    made = pod(project, *words)
    assert isinstance(made.observe(), Absent)
    first = made.up()
    assert (first.is_ready, first.is_managed) == (True, True)
    assert (first.place.zone, first.place.capacity) == (made.node.place.zone, "spot")
    assert len(first.status.endpoints) == first.status.spec.workers == made.node.spec.workers
    assert not made.node.diff(first)
    assert made.up().status.uid == first.status.uid
    assert len(made.creation_requests()) == (words[0].startswith("tpu.provisioner"))
    project.inject_fault(kind="preempted", after_seconds=0)
    wait_for(lambda: first.pod_seen(project.context).state in LOST_STATES, "the preemption")
    second = made.up()
    assert second.is_ready
    assert second.status.uid != first.status.uid
    assert first.pod_seen(project.context).replaced
    made.down()
    assert made.leftovers() == made.machines() == []
    assert isinstance(made.observe(), Absent)


@PROVISIONERS
def test_another_count_of_workers_is_an_error_that_explains_itself(project: EmulatedProject, way: str) -> None:
    made = pod(project, f"tpu.provisioner={way}")
    project.inject_fault(kind="endpoints", endpoints=2)
    with pytest.raises(CloudError, match=r"lists 1 worker for v5litepod-8, but Google created 2") as refused:
        made.up()
    assert "tpu.accelerator_type" in str(refused.value)
    assert len(made.creation_requests()) == 1
    assert [f.check for f in made.node.findings(made.observe())] == ["endpoints"]
    made.down()
    assert made.leftovers() == []


def foreign(made: Pod, kind: str = "v5litepod-1") -> None:
    """Someone else's pod of the same name."""
    body = made.project.cloud.node_body(made.node.spec.network, kind)
    body["networkConfig"]["subnetwork"] = made.node.place.subnetwork
    made.project.cloud.call_and_wait(
        "POST", f"tpu/v2/projects/slipway-local/locations/{A}/nodes?nodeId={made.node.name}", body
    )


def test_a_name_that_is_taken_is_refused_and_left_alone(project: EmulatedProject) -> None:
    made = pod(project)
    foreign(made)
    with pytest.raises(CloudError, match=r"was not created by Slipway and differs .*set tpu\.name to another"):
        made.up()
    assert len(made.creation_requests()) == 1  # the other one's
    made.down()
    assert made.leftovers() == [f"{A}/nodes/{made.node.name}"]


def answer(made: Pod, **changes: object) -> dict[str, Any]:
    """Return the node as the API would, with changes; None leaves a field out."""
    path = f"tpu/v2/projects/slipway-local/locations/{A}/nodes/{made.node.name}"
    node = made.project.cloud.call_ok("GET", path) | changes
    return {key: value for key, value in node.items() if value is not None}


def test_a_field_that_google_leaves_out_is_as_requested(project: EmulatedProject) -> None:
    made = pod(project, "tpu.provisioner=node")
    node = made.up()
    full = answer(made)["networkConfig"]
    for changes in (
        {"runtimeVersion": None},
        {"networkConfig": {"enableExternalIps": False}},
        {"networkConfig": None, "networkConfigs": [full]},
        {"networkConfig": full | {"network": full["network"].replace("314159265358", "slipway-local")}},
    ):
        assert not made.node.diff(replace(node, status=parse_node(answer(made, **changes)))), changes
    assert parse_node(answer(made, networkConfig=None, networkConfigs=[])).spec.network == ""
    other = parse_node(answer(made, runtimeVersion="tpu-ubuntu2204-base"))
    assert made.node.diff(replace(node, status=other))
    made.down()


@pytest.mark.parametrize("way", ["node", "queued"])
@pytest.mark.parametrize("form", ["absent", "full", "other"])
def test_a_pod_that_google_shows_otherwise_than_it_was_requested_stays(
    project: EmulatedProject, form: str, way: str
) -> None:
    """Also for the next controller, and while the record of it cannot be read; another pod of that name is replaced."""
    made, project.context.bucket = pod(project, f"tpu.provisioner={way}"), f"{project.tag}-bucket"
    project.inject_fault(kind="echo", form=form)
    first = made.up()
    assert ("with other settings than requested (runtime_version: other -> " in made.notes) == (form == "other")
    assert made.up().status.uid == first.status.uid
    assert not made.node.diff(made.observe())
    if form == "other":
        project.inject_fault(kind="http", status=503, match="GET .*echoes", times=6)
        assert not made.node.diff(made.observe())
        assert "cannot see whether it was requested as Google shows it" in made.notes
        larger = pod(project, f"tpu.provisioner={way}", "tpu=v5litepod_1", f"tpu.zone={A}")
        project.inject_fault(kind="echo", form=form)
        assert larger.up().status.uid != first.status.uid
        project.context.bucket = f"{project.tag}-none"
    assert len(made.creation_requests()) == 1 + (form == "other")
    project.cloud.call_ok("DELETE", "emulator/faults")
    made.down()
    assert made.leftovers() == []


def test_an_adopted_pod_must_be_there_and_of_the_type_and_is_left(project: EmulatedProject) -> None:
    made = pod(project, "tpu.adopt=true")
    with pytest.raises(CloudError, match=r"pod .* does not exist in us-central1-a, and tpu\.adopt=true requires"):
        made.up()
    assert [f.severity for f in made.node.findings(made.observe())] == ["error"]
    assert made.creation_requests() == []
    foreign(made, "v5litepod-8")
    node = made.up()
    assert (node.status.state, node.is_managed) == ("READY", False)
    other = pod(project, "tpu.adopt=true", "tpu=v5litepod_1", f"tpu.zone={A}")
    with pytest.raises(CloudError, match=r"accelerator_type: v5litepod-8 -> v5litepod-1.*never changes"):
        other.up()
    made.down()
    assert made.leftovers() == [f"{A}/nodes/{made.node.name}"]
    assert len(made.creation_requests()) == 1


@pytest.mark.parametrize("words", [("tpu.provisioner=node",), ("tpu.provisioner=queued",), INSTANCE])
def test_a_stopped_pod_is_started_and_keeps_its_disk(project: EmulatedProject, words: tuple[str, ...]) -> None:
    made = pod(project, *words, "tpu.capacity=on_demand")
    first = made.up()
    assert first.cannot_stop == ""
    first.stop(project.context)
    assert first.pod_seen(project.context).state == "STOPPED"
    again = made.up()
    assert (again.status.state, again.status.uid) == ("READY", first.status.uid)
    assert "the node is stopped; starting it" in made.notes
    if words == ("tpu.provisioner=node",):
        again.stop(project.context)
        project.inject_fault(kind="stockout", times=1)
        assert made.up().status.uid != first.status.uid, "there is no room to start it: it is made anew"
        assert "no capacity to start it in us-central1-a" in made.notes
    made.down()
    assert made.leftovers() == made.machines() == []


@pytest.mark.parametrize("kind", ["v5litepod_8", "v6e_8"])
def test_a_data_disk_outlives_a_preemption_and_no_vain_attempt(project: EmulatedProject, kind: str) -> None:
    zone, words = B, ("tpu.provisioner=node", "tpu.data_disk_gb=100", *TWO_ZONES)
    if kind == "v6e_8":
        zone, words = "us-east5-b", ("tpu=v6e_8", "tpu.zone=us-east5-b", "tpu.provisioner=node", "tpu.data_disk_gb=100")
    made = pod(project, *words)
    project.inject_fault(kind="stockout", zone=A, at="request")
    assert made.up().place.zone == zone
    [disk] = [name for name in made.leftovers() if "/disks/" in name]
    assert disk == f"projects/slipway-local/zones/{zone}/disks/{made.node.name}-data"
    found = project.cloud.call_ok("GET", "emulator/state")["compute"][disk]
    kinds = {"v5litepod_8": "pd-balanced", "v6e_8": "hyperdisk-balanced"}
    assert (found["sizeGb"], found["type"].rpartition("/")[2]) == ("100", kinds[kind])
    if kind == "v5litepod_8":
        project.inject_fault(kind="preempted", after_seconds=0)
        wait_for(lambda: made.observe().status.state == "PREEMPTED", "the preemption")
        project.inject_fault(kind="stockout", zone=A, at="request")
        made.up()
        assert [name for name in made.leftovers() if "/disks/" in name] == [disk]
    made.down()
    assert made.leftovers() == []


def test_what_is_worth_saying_of_a_pod_that_is_there(project: EmulatedProject) -> None:
    made = pod(project)
    assert made.node.cannot_stop == "Google cannot stop spot pods; `slipway down` deletes it"
    assert "only pods with one VM" in replace(made.node, spec=replace(made.node.spec, workers=4)).cannot_stop
    status = SliceStatus(spec=made.node.spec, place=made.node.places[0], state="STOPPED")
    assert [f.check for f in made.node.findings(replace(made.node, status=status))] == ["foreign_pod"]
    sick = replace(status, labels=(("managed-by", "slipway"),), health="UNHEALTHY_TENSORFLOW")
    ill = replace(made.node, status=sick)
    [finding] = made.node.findings(ill)
    assert str(finding).startswith("tpu.name: Google reports the pod as unhealthy_tensorflow")


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


@pytest.mark.parametrize("status", [500, 502])
@pytest.mark.parametrize("way", ["tpu.provisioner=node", "tpu.provisioner=queued", "instance"])
def test_an_error_at_google_counts_whether_it_is_an_answer_or_in_an_operation(
    project: EmulatedProject, status: int, way: str
) -> None:
    made = pod(project, *(INSTANCE if way == "instance" else (way,)))
    answer = {"kind": "http", "status": status, "match": "POST .*/(nodes|queuedResources|instances)$"}
    project.inject_fault(**answer, times=6, message="bad gateway")  # the client sends it six times
    assert made.up().is_ready
    assert "an error at Google in" in made.notes
    assert "(attempt 1): bad gateway" in made.notes
    made.down()
    project.inject_fault(**answer, times=99)
    with pytest.raises(CloudError, match=r"try another tpu\.zone, or later") as ended:
        made.up()
    assert not isinstance(ended.value, GoogleError)
    assert made.leftovers() == made.machines() == []


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


TIERS = ("tpu.provisioner=node", "tpu.capacity=[on_demand,spot]")
NODE, QUEUED = ("tpu.provisioner=node", *TWO_ZONES), ("tpu.provisioner=queued", *TWO_ZONES)
ON_DEMAND = {"capacity": "on_demand"}
ELSEWHERE: dict[str, tuple[tuple[str, ...], list[dict[str, Any]], list[str]]] = {
    "the next tier": (
        (*TIERS, *TWO_ZONES), [{"kind": "stockout", "times": 9, "at": "request"} | ON_DEMAND],
        [f"{A} on_demand", f"{A} spot"],
    ),
    "a stock-out": (
        QUEUED, [{"kind": "stockout", "times": 9, "zone": A, "at": "request"}], [f"{A} spot", f"{B} spot"]
    ),
    "a quota rules its place out": (
        QUEUED,
        [{"kind": "quota", "zone": A, "times": 9}, {"kind": "stockout", "zone": B, "times": 1, "at": "request"}],
        [f"{A} spot", f"{B} spot", f"{B} spot"],
    ),
    "so does a policy": (
        QUEUED, [{"kind": "policy", "constraint": "gcp.resourceLocations", "location": "us-east1"}],
        [f"{A} spot", f"{B} spot"],
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
    project.context.refused_since[hidden_place(A, PLANES["tpu_api"])] = 0.0  # where it is closed, then for long
    first = made.up()
    assert f"{first.place.zone} {first.place.capacity}" == asked[-1]
    assert made.up().status.uid == first.status.uid
    assert made.asked() == asked
    assert ("retrying" in made.notes) == (len({*asked}) < len(asked))
    assert made.node.pod_seen(project.context) == PodStatus("READY", health="HEALTHY")
    made.down()
    assert made.leftovers() == []


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

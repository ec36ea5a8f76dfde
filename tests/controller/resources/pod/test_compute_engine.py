"""Slices on Compute Engine: parts, leftovers, VMs. Their life is in ../test_node.py."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.cleanup.orphans import billed_items, delete
from controller.core.errors import CloudError
from controller.core.this_process import Clock
from controller.gcp.answers import delete_when_ready
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import GoogleError, NotFoundError
from controller.resources import deletions
from controller.resources.pod.compute_engine import ComputeEngine
from controller.resources.pod.instance_groups import InstanceVms, change
from controller.resources.pod.plane import Leftover
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.fake_pod import GROUP, INSTANCE, ZONE, Pod, pod, request_slice
from tests.controller.resources.pod.test_instance_bodies import PLACE, SPEC
from tests.fakes.context import make_context
from tests.fakes.google import KilledError

PLANE = ComputeEngine()
PARTS = ("/instanceGroupManagers/", "/instances/", "/resourcePolicies/", "/instanceTemplates/")


def parts(made: Pod) -> list[str]:
    """What of a pod exists: kinds of resources."""
    return sorted(part.strip("/") for name in made.machines() for part in PARTS if part in name)


def create(made: Pod) -> None:
    """Send the requests that make a slice."""
    place = made.node.places[0]
    maker = PLANE.provisioners(60.0)[place.provisioner]
    request_slice(made, maker, made.node.spec, place)


def dying(send: Callable[..., Any], requests: int) -> Callable[..., Any]:
    left = iter(range(requests))

    def change_pod(api: str, method: str, **parameters: Any) -> Any:
        if next(left, None) is None:
            raise KilledError
        return send(api, method, **parameters)

    return change_pod


LEFT = {
    "creates": [[], ["workload policy"], ["instance template", "workload policy"], ["mig"], ["mig"]],
    "deletes": [["mig"], ["instance template", "workload policy"], ["workload policy"], []],
}
"""What is found after each request of a controller that is killed while it does this."""


@pytest.mark.parametrize("what", LEFT)
def test_a_controller_that_is_killed_leaves_what_is_found(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    made, context = pod(project, *GROUP), project.context
    for requests, expected in enumerate(LEFT[what]):
        if what == "deletes":
            create(made)
        with monkeypatch.context() as patch, suppress(KilledError):
            patch.setattr(context.google, "change_pod", dying(context.google.change_pod, requests))
            create(made) if what == "creates" else PLANE.provisioners(0.0)["mig"].delete(context, made.node.name, ZONE)
        leftovers = [one for one in PLANE.leftovers(context) if made.node.name in one.name]
        slices = [one.place.provisioner for one in PLANE.slices(context) if one.name == made.node.name]
        assert [*(one.kind for one in leftovers), *slices] == expected, requests
        if what == "creates" and requests == 2:
            assert made.up().is_ready, "the next controller goes on with what exists"
            assert not [one for one in PLANE.leftovers(context) if made.node.name in one.name], "they are in use"
        for one in leftovers:
            PLANE.delete_leftover(context, one)
        for one in (thing for thing in billed_items(context, []) if made.node.name in thing.name):
            delete(context, one)
        assert parts(made) == []
    PLANE.delete_leftover(context, Leftover("disk", "x", "us-east5", 0.0))  # not of this plane


@pytest.mark.parametrize("method", ["regionInstanceTemplates.insert", "instanceGroupManagers.insert"])
def test_a_refused_group_leaves_nothing(project: EmulatedProject, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    made, send = pod(project, *GROUP), project.context.google.change_pod

    def change_pod(api: str, called: str, **parameters: Any) -> Any:
        if called == method:
            raise GoogleError(method, 400, "invalid", "Invalid value for field 'x': The URL is malformed.")
        return send(api, called, **parameters)

    monkeypatch.setattr(project.context.google, "change_pod", change_pod)
    with pytest.raises(CloudError, match="The URL is malformed"):
        made.up()
    assert parts(made) == []


def test_a_refusal_is_told_although_its_group_cannot_be_deleted_yet(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search goes on; the next verb deletes the group."""
    made, send = pod(project, *GROUP), project.context.google.change_pod
    monkeypatch.setattr(deletions, "OPERATION_SECONDS", 0.0)
    monkeypatch.setattr(deletions, "PROVISIONING_SECONDS", 0.0)
    refusals = {
        "instanceGroupManagers.resize": GoogleError("resize", 400, "invalid", "The URL is malformed."),
        "instanceGroupManagers.delete": GoogleError("delete", 400, "resourceNotReady", "It is not ready"),
    }

    def change_pod(api: str, called: str, **parameters: Any) -> Any:
        if called in refusals:
            raise refusals[called]
        return send(api, called, **parameters)

    with monkeypatch.context() as patch:
        patch.setattr(project.context.google, "change_pod", change_pod)
        with pytest.raises(CloudError, match="The URL is malformed"):
            made.up()
    assert [one.pod for one in deletions.deletions_here(project.context, [])] == [made.node.name]
    made.down()
    assert parts(made) == []


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "topology_hidden"},
        {"kind": "open_operation", "verb": "resize", "seconds": 1e6},
        {"kind": "open_operation", "verb": "insert", "seconds": 1.0},
        {"kind": "lagging_lists", "seconds": 4.0},
    ],
    ids=str,
)
def test_a_group_whose_vms_run_is_the_pod(project: EmulatedProject, fault: dict[str, Any]) -> None:
    """Whether Google shows its topology, ends the operation of `resize`, and has its VMs in every list at once."""
    made = pod(project, *GROUP)
    project.inject_fault(**fault)
    node = made.up()
    assert (node.is_ready, len(node.status.endpoints)) == (True, 2)
    assert "no capacity" not in made.notes
    resized = [r for r in project.cloud.request_log() if r["path"].endswith(f"{made.node.name}/resize")]
    assert len(resized) == 1
    project.cloud.call_ok("DELETE", "emulator/faults")
    made.down()
    assert parts(made) == []


@pytest.mark.parametrize("reason", ["resourceNotReady", "INVALID_ARGUMENT"])
def test_a_deletion_that_is_under_way_is_waited_for(reason: str) -> None:
    """The answer to the first request was lost, so it is sent again."""
    answers: list[GoogleError] = [
        GoogleError("compute instances.delete", 400, reason, "The resource 'projects/p1/pod' is not ready"),
        NotFoundError("compute instances.delete", 404, "notFound", "gone"),
    ]

    def delete() -> None:
        raise answers.pop(0)

    delete_when_ready(make_context(None), delete)
    assert answers == []


def test_groups_of_other_machines_are_no_slices() -> None:
    items = {
        "instanceGroupManagers": [{"name": "web", "baseInstanceName": "web"}],
        "instances": [{"name": "web-1", "machineType": "zones/z/machineTypes/e2-small"}],
    }

    def call(api: str, method: str, **_: Any) -> dict[str, Any]:
        collection, verb = method.split(".")
        assert verb == "aggregatedList", "their VMs are not looked at"
        return {"items": {f"zones/{ZONE}": {collection: items[collection]}}}

    assert list(PLANE.slices(make_context(SimpleNamespace(call=call)))) == []


def test_a_user_without_a_right_to_list_groups_is_told_once(project: EmulatedProject) -> None:
    words = "needs compute.instanceGroupManagers.list"
    project.inject_fault(kind="http", status=403, match=".*aggregated/instanceGroupM", times=9, message=words)
    assert [*PLANE.slices(project.context), *PLANE.slices(project.context)] == []
    assert project.notes == [f"cannot look for pods of Compute Engine: {words}"]


@pytest.mark.parametrize(
    ("workers", "tier", "words"), [(2, "on_demand", "one VM"), (1, "spot", "spot pods"), (1, "on_demand", "")]
)
def test_what_can_be_stopped(workers: int, tier: str, words: str) -> None:
    found = PLANE.cannot_stop("pod", replace(SPEC, workers=workers), replace(PLACE, capacity=tier))
    assert words in found
    assert bool(found) == bool(words)
    assert PLANE.delete_permission("mig") == "compute.instanceGroupManagers.delete"
    assert PLANE.delete_permission("instance") == "compute.instances.delete"


def test_a_zone_without_capacity_is_left_and_nothing_stays_there(project: EmulatedProject) -> None:
    made, context = pod(project, *GROUP, "tpu.fallback_zones=[us-east1-d]", "cloud.bucket_location=us"), project.context
    project.inject_fault(kind="stockout", zone=ZONE, times=9)
    there = made.up().place.zone
    assert there == "us-east1-d"
    assert f"no capacity in {ZONE} (spot)" in made.notes
    assert len(parts(made)) == 5  # a group with two VMs, a policy and a template
    change(context, "instanceGroupManagers.delete", zone=there, instanceGroupManager=made.node.name)
    assert parts(made) == ["instanceTemplates", "resourcePolicies"]
    assert made.observe().status.state == "GONE"
    made.down()
    assert parts(made) == []


@pytest.mark.parametrize("words", [GROUP, INSTANCE], ids=["mig", "instance"])
@pytest.mark.parametrize("at", ["request", "operation"])
def test_vms_that_cannot_announce_a_preemption_are_made_without_notice(
    project: EmulatedProject, words: tuple[str, ...], at: str
) -> None:
    made = pod(project, *words, "tpu.capacity=spot")
    refusal = "Invalid value for field 'resource.scheduling.preemptionNoticeDuration': ''. It is not supported here."
    project.inject_fault(kind="failure", code=400, message=refusal, plane="compute_engine", at=at)
    assert made.up().is_ready
    assert "asking again without preemptionNoticeDuration" in made.notes
    state = project.cloud.call_ok("GET", "emulator/state")["compute"]
    mine = [item for name, item in state.items() if made.node.name in name and "/instances/" in name]
    assert [item["scheduling"].get("preemptionNoticeDuration") for item in mine] == [None] * made.node.spec.workers
    made.down()
    assert parts(made) == []


@pytest.mark.parametrize(("words", "count"), [(GROUP, 5), (INSTANCE, 1)])
def test_a_pod_that_another_user_made_is_used_and_left(
    project: EmulatedProject, words: tuple[str, ...], count: int
) -> None:
    owner = pod(project, *words)
    owner.up()
    adopter = pod(project, *words, "tpu.adopt=true")
    assert adopter.up().is_ready
    adopter.down()
    assert len(parts(owner)) == count
    if words == INSTANCE:
        other = pod(project, "tpu=v6e_4", "tpu.plane=compute_engine", f"tpu.zone={ZONE}", "tpu.adopt=true")
        with pytest.raises(CloudError, match=r"does not match the config \(accelerator_type: v6e-8 -> v6e-4\)"):
            other.up()
    owner.down()
    assert parts(owner) == []


VMS = InstanceVms("p1", ZONE, ("pod-0", "pod-1"))


def with_keys(*keys: str) -> tuple[Any, list[dict[str, Any]]]:
    """A client that knows a VM for each of these keys, and the metadata that it is sent."""
    sent: list[dict[str, Any]] = []

    def call(api: str, method: str, *, instance: str, **parameters: Any) -> dict[str, Any]:
        if method == "instances.setMetadata":
            sent.append({"instance": instance, **parameters["body"]})
            return {"name": "operation-1", "status": "DONE"}
        if method == "instances.get":
            items = [{"key": "ssh-keys", "value": keys[int(instance[-1])]}, {"key": "other", "value": "stays"}]
            return {"metadata": {"fingerprint": f"f{instance[-1]}", "items": items}}
        assert parameters["queryPath"] == "hostkeys/"
        if instance == "pod-1":
            raise NotFoundError(method, 404, "notFound", "nothing yet")
        return {"queryValue": {"items": [{"namespace": "hostkeys", "key": "ssh-ed25519", "value": "AAAA"}]}}

    google: Any = GoogleClient(None, Clock())
    google.call = google.change_pod = call
    return google, sent


def test_a_key_counts_if_every_vm_has_it_and_is_added_where_it_is_missing(tmp_path: Path) -> None:
    assert VMS.ssh_keys(with_keys("a:1\nb:2", "b:2\nc:3")[0]) == "b:2"
    google, sent = with_keys("a:1\nb:2", "c:3")
    VMS.add_ssh_key(make_context(google, tmp_path, project="p1"), "b:2")
    items = [{"key": "ssh-keys", "value": "c:3\nb:2"}, {"key": "other", "value": "stays"}]
    assert sent == [{"instance": "pod-1", "fingerprint": "f1", "items": items}]


def test_the_name_of_a_vm_is_known_before_it_publishes_anything() -> None:
    name = {"namespace": "guestInventory", "key": "hostname"}
    first, second = VMS.guest_attributes(with_keys()[0])
    key = {"namespace": "hostkeys", "key": "ssh-ed25519", "value": "AAAA"}
    assert first == [key, {**name, "value": "pod-0"}]
    assert second == [{**name, "value": "pod-1"}]

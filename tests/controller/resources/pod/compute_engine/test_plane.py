"""The life of slices on Compute Engine, against a fake client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controller.gcp.errors import ForbiddenError, GoogleError, NotFoundError
from controller.resources.pod.compute_engine.groups import GroupProvisioner
from controller.resources.pod.compute_engine.instances import InstanceProvisioner
from controller.resources.pod.compute_engine.plane import ComputeEngine
from controller.resources.pod.compute_engine.requests import delete_when_ready
from controller.resources.pod.compute_engine.spec import VmSpec
from controller.resources.pod.plane import Leftover
from controller.resources.pod.refusals import classify
from tests.controller.resources.pod.compute_engine.fake import (
    PLACE,
    REGION,
    SPEC,
    ZONE,
    FakeGoogle,
    Stopped,
    context_of,
)

MAKER, PLANE = GroupProvisioner(), ComputeEngine()


def test_a_group_is_made_in_the_order_that_google_needs_and_deleted_whole(tmp_path: Path) -> None:
    google = FakeGoogle(on_resize=lambda made: made.runs("pod-x1", "pod-a2"))
    context = context_of(google, tmp_path)
    MAKER.create(context, "pod", SPEC, PLACE)
    assert google.calls == [
        "resourcePolicies.insert", "regionInstanceTemplates.insert", "instanceGroupManagers.insert",
        "instanceGroupManagers.resize",
    ]  # fmt: skip
    status = MAKER.observe(context, "pod", ZONE)
    assert status is not None
    assert status.is_ready
    assert status.spec.at(status.place) == {**SPEC.at(PLACE)}
    assert [endpoint.vm for endpoint in status.endpoints] == ["pod-a2", "pod-x1"]
    MAKER.delete(context, "pod", ZONE)
    assert {kind for kind, _ in google.held} == {"instances"}  # Google deletes them with their group
    MAKER.delete(context, "pod", ZONE)  # no error


@pytest.mark.parametrize("requests", range(5))
def test_a_controller_that_is_killed_while_it_creates_leaves_what_is_found(tmp_path: Path, requests: int) -> None:
    google = FakeGoogle(dies_after=requests)
    context = context_of(google, tmp_path)
    if requests < 4:
        with pytest.raises(Stopped):
            MAKER.create(context, "pod", SPEC, PLACE)
    else:
        MAKER.create(context, "pod", SPEC, PLACE)
    google.dies_after = None
    left = {(one.kind, one.name.partition("-")[0], one.region) for one in PLANE.leftovers(context)}
    slices = [(one.name, one.state) for one in PLANE.slices(context)]
    kinds = ["workload policy", "instance template"][:requests] if requests < 3 else []
    assert left == {(kind, "pod", REGION) for kind in kinds}
    states = {3: [("pod", "GONE")], 4: [("pod", "WAITING_FOR_RESOURCES")]}
    assert slices == states.get(requests, [])
    for one in list(PLANE.leftovers(context)):
        PLANE.delete_leftover(context, one)
    if slices:
        MAKER.delete(context, "pod", ZONE)
    assert google.held == {}


@pytest.mark.parametrize("requests", range(1, 6))
def test_a_controller_that_is_killed_while_it_deletes_leaves_what_is_found(tmp_path: Path, requests: int) -> None:
    google = FakeGoogle()
    context = context_of(google, tmp_path)
    MAKER.create(context, "pod", SPEC, PLACE)
    google.calls.clear()
    google.dies_after = requests
    if requests < 5:
        with pytest.raises(Stopped):
            MAKER.delete(context, "pod", ZONE)
    else:
        MAKER.delete(context, "pod", ZONE)
    google.dies_after = None
    found = {name for (_, name) in google.held}
    assert {one.name for one in PLANE.leftovers(context)} | {one.name for one in PLANE.slices(context)} == found


@pytest.mark.parametrize("reason", ["resourceNotReady", "INVALID_ARGUMENT"])
def test_a_deletion_that_is_under_way_is_waited_for(tmp_path: Path, reason: str) -> None:
    """The answer to the first request was lost, so it is sent again."""
    context = context_of(FakeGoogle(), tmp_path)
    answers: list[GoogleError] = [
        GoogleError("compute instances.delete", 400, reason, "The resource 'projects/p1/pod' is not ready"),
        NotFoundError("compute instances.delete", 404, "notFound", "gone"),
    ]

    def delete() -> None:
        raise answers.pop(0)

    delete_when_ready(context, delete)
    assert answers == []


def test_the_next_controller_goes_on_with_what_exists(tmp_path: Path) -> None:
    google = FakeGoogle(dies_after=2)
    context = context_of(google, tmp_path)
    with pytest.raises(Stopped):
        MAKER.create(context, "pod", SPEC, PLACE)
    google.dies_after = None
    MAKER.create(context, "pod", SPEC, PLACE)
    assert sorted(kind for kind, _ in google.held) == [
        "instanceGroupManagers",
        "regionInstanceTemplates",
        "resourcePolicies",
    ]


@pytest.mark.parametrize(
    ("method", "words", "kind"),
    [
        ("regionInstanceTemplates.insert", "This user agent is not allowed to use the machine type", "type"),
        ("instanceGroupManagers.insert", "MIGs with TPU accelerator topology require BULK mode in target size policy",
         "bad_request"),
        ("instanceGroupManagers.insert", "Invalid value for field 'x': The URL is malformed.", "bad_request"),
    ],
)  # fmt: skip
def test_a_refused_group_leaves_nothing(tmp_path: Path, method: str, words: str, kind: str) -> None:
    google = FakeGoogle(refuse={method: GoogleError(method, 400, "invalid", words)})
    with pytest.raises(GoogleError) as refused:
        MAKER.create(context_of(google, tmp_path), "pod", SPEC, PLACE)
    assert google.held == {}
    assert classify(refused.value.reason, refused.value.message) == kind


def test_a_slice_of_one_vm_is_an_instance(tmp_path: Path) -> None:
    google, maker = FakeGoogle(), InstanceProvisioner()
    context, spec = context_of(google, tmp_path), replace(SPEC, workers=1, own=VmSpec("ct6e-standard-8t", "2x4", 200))
    assert maker.observe(context, "pod", ZONE) is None
    is_answered = maker.create(context, "pod", spec, replace(PLACE, provisioner="instance"))
    assert is_answered()
    google.held["instances", "pod"] |= {"status": "RUNNING", "zone": f"zones/{ZONE}"}
    status = maker.observe(context, "pod", ZONE)
    assert status is not None
    assert status.is_ready
    assert status.is_labelled
    assert (status.spec.accelerator_type, status.place.provisioner) == ("v6e-8", "instance")
    [listed] = PLANE.slices(context)
    assert listed.uid == status.uid
    maker.delete(context, "pod", ZONE)
    assert google.held == {}


def test_groups_of_other_machines_are_no_slices(tmp_path: Path) -> None:
    google = FakeGoogle()
    context = context_of(google, tmp_path)
    google.held["instanceGroupManagers", "web"] = {"name": "web", "baseInstanceName": "web"}
    google.held["instances", "web-1"] = {"name": "web-1", "machineType": "zones/z/machineTypes/e2-small"}
    assert list(PLANE.slices(context)) == []
    assert "instanceGroupManagers.listManagedInstances" not in google.calls


def test_a_user_without_a_right_to_list_groups_is_told_once(tmp_path: Path) -> None:
    method = "instanceGroupManagers.aggregatedList"
    google = FakeGoogle(
        refuse={method: ForbiddenError(method, 403, "forbidden", "needs compute.instanceGroupManagers.list")}
    )
    context, told = context_of(google, tmp_path), []
    context.events.note = lambda subject, text, **more: told.append(text)  # type: ignore[method-assign]
    assert [*PLANE.slices(context), *PLANE.slices(context)] == []
    assert told == ["cannot look for pods of Compute Engine: needs compute.instanceGroupManagers.list"]


def test_parts_in_use_are_no_leftovers(tmp_path: Path) -> None:
    google = FakeGoogle()
    context = context_of(google, tmp_path)
    MAKER.create(context, "pod", SPEC, PLACE)
    assert list(PLANE.leftovers(context)) == []
    PLANE.delete_leftover(context, Leftover("disk", "x", REGION, 0.0))
    assert len(google.held) == 3


@pytest.mark.parametrize(
    ("workers", "tier", "words"), [(2, "on_demand", "one VM"), (1, "spot", "spot pods"), (1, "on_demand", "")]
)
def test_what_can_be_stopped(workers: int, tier: str, words: str) -> None:
    found = PLANE.cannot_stop("pod", replace(SPEC, workers=workers), replace(PLACE, capacity=tier))
    assert words in found
    assert bool(found) == bool(words)


def test_the_permission_to_delete_is_that_of_the_slice() -> None:
    assert PLANE.delete_permission("mig") == "compute.instanceGroupManagers.delete"
    assert PLANE.delete_permission("instance") == "compute.instances.delete"

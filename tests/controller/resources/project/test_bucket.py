"""The bucket: made as it should be, adopted as it is, refused where it is far away or someone else's."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.errors import CloudError
from controller.reconcile.reconciler import destroy
from tests.controller.localcloud.harness import REGION
from tests.controller.resources.conftest import EmulatedProject


def by_hand(project: EmulatedProject, **body: Any) -> dict[str, Any]:
    made = {"name": f"{project.tag}-bucket", "location": REGION, **body}
    return project.cloud.call_ok("POST", "storage/v1/b?project=slipway-local", made)


def show(project: EmulatedProject) -> dict[str, Any]:
    return project.cloud.call_ok("GET", f"storage/v1/b/{project.tag}-bucket")


def test_a_bucket_of_ours_costs_no_more_than_it_must_and_is_closed(project: EmulatedProject) -> None:
    project.create_shared()
    made = show(project)
    assert made["location"] == "US-CENTRAL1"
    assert made["iamConfiguration"]["uniformBucketLevelAccess"]["enabled"] is True
    assert made["iamConfiguration"]["publicAccessPrevention"] == "enforced"
    rules = {rule["action"]["type"] for rule in made["lifecycle"]["rule"]}
    assert rules == {"AbortIncompleteMultipartUpload", "Delete"}
    drifted = {"softDeletePolicy": {"retentionDurationSeconds": "604800"}, "lifecycle": None}
    project.cloud.call_ok("PATCH", f"storage/v1/b/{project.tag}-bucket", drifted)
    assert project.planned_actions() == {f"bucket/{project.tag}-bucket": "update"}
    project.create_shared()
    assert project.planned_actions() == {}
    assert show(project)["softDeletePolicy"]["retentionDurationSeconds"] == "0"
    for number in range(40):
        project.context.google.upload(f"{project.tag}-bucket", f"runs/x/{number}", b"x")
    destroy(project.shared_resources(), project.context)  # with all generations
    assert project.cloud.call("GET", f"storage/v1/b/{project.tag}-bucket")[0] == 404


def test_soft_delete_and_a_location_for_several_regions_are_choices(project: EmulatedProject) -> None:
    words = ("cloud.soft_delete_days=7", "cloud.bucket_location=us")
    project.create_shared(*words, "zones=us-west4-a")
    assert show(project)["softDeletePolicy"]["retentionDurationSeconds"] == "604800"
    assert show(project)["location"] == "US"
    assert project.planned_actions(words[0], "zones=us-west4-a") == {}
    assert project.planned_actions(words[0], "zones=europe-west4-b")[f"bucket/{project.tag}-bucket"] == "replace"


def test_an_existing_bucket_is_used_as_it_is_and_its_soft_delete_is_told_with_the_cost(
    project: EmulatedProject,
) -> None:
    before = by_hand(project, softDeletePolicy={"retentionDurationSeconds": "604800"})
    project.create_shared()
    assert show(project) == before
    [note] = [note for note in project.notes if "soft delete" in note]
    assert "keeps and bills deleted objects for 7 days" in note
    assert "100 deleted checkpoints of 31 GB are 3.1 TB, about $14" in note
    assert "--clear-soft-delete" in note
    destroy(project.shared_resources(), project.context)
    assert show(project) == before


def test_a_bucket_far_away_is_refused(project: EmulatedProject) -> None:
    before = by_hand(project, location="europe-west4")
    with pytest.raises(CloudError, match=r"is in europe-west4, the TPU in us-central1: .* set cloud.bucket"):
        project.create_shared()
    assert show(project) == before


@pytest.mark.parametrize("when", ["before", "while we create it"])
def test_a_name_taken_by_someone_else(project: EmulatedProject, when: str) -> None:
    path = f"/storage/v1/b/{project.tag}-bucket"
    if when != "before":
        project.inject_fault(kind="http", status=404, match=f"GET {path}$")
        project.inject_fault(kind="http", status=409, match="POST /storage/v1/b$", message="The name is not available.")
    project.inject_fault(kind="http", status=403, match=f"GET {path}", times=9, message="no storage.buckets.get access")
    with pytest.raises(CloudError, match=r"you cannot use bucket .* set cloud.bucket to another name"):
        project.create_shared()


def test_objects_may_be_used_without_looking_at_the_bucket(project: EmulatedProject) -> None:
    by_hand(project)
    project.inject_fault(kind="http", status=403, match=f"GET /storage/v1/b/{project.tag}-bucket$", times=9)
    project.create_shared("cloud.bucket_roles=[]")
    assert project.cloud.call("GET", f"storage/v1/b/{project.tag}-bucket")[0] == 403  # still
    project.context.google.upload(f"{project.tag}-bucket", "runs/x", b"x")
    assert project.context.google.download(f"{project.tag}-bucket", "runs/x") == b"x"


def test_its_name_is_nobody_elses(project: EmulatedProject) -> None:
    for words, name in (((), "us-central1"), (("cloud.bucket_location=us",), "us")):
        found = project.shared_resources("cloud.bucket=null", *words)
        assert [r.name for r in found if r.kind == "bucket"] == [f"slipway-local-slipway-{name}"]

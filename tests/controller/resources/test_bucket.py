"""Bucket, APIs and budget of a project: made as they should be, adopted, waited for, refused in clear words."""

from typing import Any

import pytest

from controller.core.errors import CloudError
from controller.gcp.google_errors import ConflictError
from controller.plan.build import preview_resources
from controller.reconcile import Change, Diff, NotEnabled, destroy, reconcile
from controller.resources import bucket
from controller.resources.services import BillingBudget, Services
from tests.controller.localcloud.harness import PROJECT, REGION
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


def test_a_bucket_that_others_still_write_to_is_emptied_again(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google deletes no bucket with an object in it; and somebody else may delete it first."""
    project.create_shared()
    google, name = project.context.google, f"{project.tag}-bucket"
    real, late = google.call, ["a", "b", "c"]

    def call(api: str, method: str, **parameters: Any) -> Any:
        if method == "buckets.delete" and late:
            google.upload(name, late.pop(), b"a controller's last words")
        return real(api, method, **parameters)

    monkeypatch.setattr(google, "call", call)
    destroy(project.shared_resources(), project.context)
    assert (late, project.cloud.call("GET", f"storage/v1/b/{name}")[0]) == ([], 404)

    project.create_shared()
    monkeypatch.setattr(bucket, "WRITTEN_SECONDS", 0.0)
    late.append("d")
    with pytest.raises(ConflictError, match="not empty"):
        destroy(project.shared_resources(), project.context)


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


SERVICES = f"serviceusage/v1/{PROJECT}/services"


def disable(project: EmulatedProject, *apis: str) -> None:
    for api in apis:
        project.cloud.call_ok("POST", f"{SERVICES}/{api}.googleapis.com:disable", {})


def test_only_what_is_missing_is_enabled(project: EmulatedProject) -> None:
    project.create_shared()
    disable(project, "tpu", "iap")
    before = len(project.cloud.request_log())
    project.create_shared()
    [request] = [r for r in project.cloud.request_log()[before:] if r["mutating"]]
    assert request["body"] == {"serviceIds": ["iap.googleapis.com", "tpu.googleapis.com"]}


def test_what_is_enabled_already_needs_no_waiting(project: EmulatedProject) -> None:
    """As when two enable it at once: the operation that Google answers with does not exist."""
    services = next(one for one in project.shared_resources() if isinstance(one, Services))
    before = len(project.cloud.request_log())
    services.apply(project.context, {}, Diff("update", (Change("apis", (), services.apis),)))
    assert {r["call"] for r in project.cloud.request_log()[before:]} == {"services.batchEnable"}
    project.cloud.refused("GET", "serviceusage/v1/operations/noop.DONE_OPERATION", None, 404)


def test_a_project_where_nothing_is_enabled(project: EmulatedProject) -> None:
    disable(project, "compute", "iam", "storage", "tpu", "cloudresourcemanager")
    rows = preview_resources(tuple(project.shared_resources()), project.context)
    [account] = [row for row in rows if row.resource.kind == "service account"]
    why = "iam.googleapis.com is not enabled yet; `up` enables it"
    assert (account.observed, account.action) == (NotEnabled(why, "iam.googleapis.com"), "create")
    project.create_shared()
    assert project.planned_actions() == {}


def test_an_api_that_is_not_enabled_everywhere_yet_is_waited_for(project: EmulatedProject) -> None:
    words = "Compute Engine API (compute.googleapis.com) has not been used in project 1 before or it is disabled."
    match = f"GET /compute/v1/{PROJECT}/global/networks/{project.tag}"
    project.inject_fault(kind="http", status=403, match=match, times=3, message=words, reason="SERVICE_DISABLED")
    project.create_shared()
    assert project.clock.sleeps.count(project.context.poll_seconds) >= 3


def test_who_may_not_enable_is_told_the_command(project: EmulatedProject) -> None:
    project.create_shared()
    disable(project, "tpu")
    project.inject_fault(kind="http", status=403, match=f"POST /{SERVICES}:batchEnable")
    with pytest.raises(CloudError, match=r"ask a project admin .* gcloud services enable tpu.googleapis.com --project"):
        project.create_shared()
    project.create_shared()


def test_who_may_not_look_goes_on(project: EmulatedProject) -> None:
    project.inject_fault(kind="http", status=403, match=f"GET /{SERVICES}:batchGet", times=9)
    before = len(project.cloud.request_log())
    project.create_shared()
    asked = [r["path"] for r in project.cloud.request_log()[before:]]
    assert f"/{SERVICES}:batchGet" in asked
    assert f"/{SERVICES}:batchEnable" not in asked
    assert f"network/{project.tag}" not in project.planned_actions()  # the rest was made
    assert len([said for said in project.notes if "cannot see which APIs are enabled" in said]) == 1


def test_a_project_that_cannot_enable_apis_is_told_so(project: EmulatedProject) -> None:
    """It may be off in a project of an old organization. Waiting would not help."""
    words = "Service Usage API (serviceusage.googleapis.com) has not been used in project 1 before or it is disabled."
    match = f"GET /{SERVICES}:batchGet"
    project.inject_fault(kind="http", status=403, match=match, message=words, reason="SERVICE_DISABLED")
    with pytest.raises(CloudError, match=r"run `gcloud services enable serviceusage\.googleapis\.com --project"):
        project.create_shared()


def budget(usd: int = 100, account: str = "012345-6789AB-CDEF01") -> BillingBudget:
    return BillingBudget(name="slipway", account=account, usd=usd, thresholds=(0.5, 0.9))


def state(project: EmulatedProject) -> dict[str, Any]:
    return project.cloud.call_ok("GET", "emulator/state").get("budget", {})


def test_its_life(project: EmulatedProject) -> None:
    assert preview_resources((budget(),), project.context)[0].action == "create"
    reconcile([budget()], project.context)
    [made] = state(project).values()
    assert made["displayName"] == "slipway slipway-local"
    assert made["budgetFilter"] == {"projects": ["projects/314159265358"], "calendarPeriod": "MONTH"}
    assert made["amount"]["specifiedAmount"] == {"currencyCode": "USD", "units": "100"}
    assert [rule["thresholdPercent"] for rule in made["thresholdRules"]] == [0.5, 0.9]
    assert preview_resources((budget(),), project.context)[0].action == "none"
    assert preview_resources((budget(200),), project.context)[0].action == "update"
    reconcile([budget(200)], project.context)
    [changed] = state(project).values()
    assert changed["amount"]["specifiedAmount"]["units"] == "200"
    destroy([budget()], project.context)
    assert state(project) == {}
    destroy([budget()], project.context)


def test_an_account_that_is_not_yours_is_explained(project: EmulatedProject) -> None:
    with pytest.raises(CloudError, match=r"roles/billing\.costsManager, or set cloud\.billing_budget=null"):
        reconcile([budget(account="FFFFFF-000000-FFFFFF")], project.context)


def test_it_is_part_of_the_plan_where_it_is_asked_for(project: EmulatedProject) -> None:
    wanted = "cloud.billing_budget={account: 012345-6789AB-CDEF01, usd: 50, thresholds: [1.0]}"
    kinds = [resource.kind for resource in project.shared_resources(wanted)]
    assert "billing budget" in kinds
    services = next(resource for resource in project.shared_resources(wanted) if resource.kind == "services")
    assert "billingbudgets.googleapis.com" in services.spec_fields()["apis"]
    assert "billing budget" not in [resource.kind for resource in project.shared_resources()]

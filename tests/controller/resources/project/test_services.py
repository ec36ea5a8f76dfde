"""Services are enabled once, waited for, and what is off is understood."""

from __future__ import annotations

import pytest

from controller.core.errors import CloudError
from controller.plan.preview import preview_resources
from controller.reconcile.resource import NotEnabled
from tests.controller.localcloud.harness import PROJECT
from tests.controller.resources.conftest import EmulatedProject

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

"""The workers' account and its roles: least privilege, given accounts, and callers who may not set IAM."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.errors import CloudError, ConfigError
from controller.reconcile.reconciler import destroy
from controller.resources.project.roles import rebind
from tests.controller.localcloud.harness import PROJECT
from tests.controller.resources.conftest import EmulatedProject

POLICY = f"cloudresourcemanager/v1/{PROJECT}"
COMPUTE_ACCOUNT = "314159265358-compute@developer.gserviceaccount.com"
ADMIN = {"role": "roles/owner", "members": ["user:a@example.com"]}


def roles(project: EmulatedProject, path: str, account: str) -> list[str]:
    method = "GET" if path.startswith("storage") else "POST"
    policy = project.cloud.call_ok(method, path, None if method == "GET" else {})
    return sorted(b["role"] for b in policy["bindings"] if f"serviceAccount:{account}" in b["members"])


def on_project(project: EmulatedProject, account: str) -> list[str]:
    return roles(project, f"{POLICY}:getIamPolicy", account)


def on_bucket(project: EmulatedProject, account: str) -> list[str]:
    return roles(project, f"storage/v1/b/{project.tag}-bucket/iam", account)


def test_the_account_has_few_roles_and_those_on_objects_are_on_the_bucket_alone(project: EmulatedProject) -> None:
    project.create_shared()
    account = f"{project.tag}-sa@slipway-local.iam.gserviceaccount.com"
    assert on_project(project, account) == ["roles/logging.logWriter", "roles/tpu.admin"]
    assert on_bucket(project, account) == ["roles/storage.legacyBucketReader", "roles/storage.objectAdmin"]


@pytest.mark.parametrize("account", ["default", COMPUTE_ACCOUNT])
def test_to_an_account_that_we_did_not_make_nothing_is_bound(project: EmulatedProject, account: str) -> None:
    before = project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {})
    observed = project.create_shared(f"cloud.service_account={account}")
    assert observed[f"service account/{account}"].email(project.context) == COMPUTE_ACCOUNT
    assert project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {}) == before
    assert on_bucket(project, COMPUTE_ACCOUNT) == []
    destroy(project.shared_resources(f"cloud.service_account={account}"), project.context)
    assert project.cloud.call("GET", f"iam/v1/{PROJECT}/serviceAccounts/{COMPUTE_ACCOUNT}")[0] == 200


def test_an_account_made_by_hand_is_used_and_kept_and_nothing_is_bound(project: EmulatedProject) -> None:
    made = {"accountId": f"{project.tag}-sa", "serviceAccount": {"displayName": "mine"}}
    account = project.cloud.call_ok("POST", f"iam/v1/{PROJECT}/serviceAccounts", made)
    project.create_shared()
    assert on_project(project, account["email"]) == []
    destroy(project.shared_resources(), project.context)
    assert project.cloud.call_ok("GET", f"iam/v1/{PROJECT}/serviceAccounts/{account['email']}") == account


def test_an_account_that_does_not_exist_is_said(project: EmulatedProject) -> None:
    absent = "nobody-x@slipway-local.iam.gserviceaccount.com"
    with pytest.raises(ConfigError, match=f"{absent} does not exist; set cloud.service_account"):
        project.create_shared(f"cloud.service_account={absent}")


@pytest.mark.parametrize("verb", ["getIamPolicy", "setIamPolicy"])
def test_who_may_not_set_iam_goes_on_with_a_note_of_what_an_admin_would_run(
    project: EmulatedProject, verb: str
) -> None:
    project.inject_fault(kind="http", status=403, match=f"POST /{POLICY}:{verb}", times=2)
    project.create_shared()
    account = f"{project.tag}-sa@slipway-local.iam.gserviceaccount.com"
    [note] = [note for note in project.notes if "ask a project admin" in note]
    assert (
        "gcloud projects add-iam-policy-binding slipway-local --condition=None "
        f"--member=serviceAccount:{account} --role=roles/logging.logWriter"
    ) in note
    assert on_bucket(project, account) != []


def test_who_may_not_create_accounts_is_told_what_else_to_do(project: EmulatedProject) -> None:
    project.inject_fault(kind="http", status=403, match=f"POST /iam/v1/{PROJECT}/serviceAccounts$")
    with pytest.raises(CloudError, match=r"gcloud iam service-accounts create .*`default`: the Compute Engine account"):
        project.create_shared()


def test_another_writer_between_reading_and_writing(project: EmulatedProject) -> None:
    project.inject_fault(kind="http", status=409, match=f"POST /{POLICY}:setIamPolicy", times=3)
    project.create_shared()
    assert on_project(project, f"{project.tag}-sa@slipway-local.iam.gserviceaccount.com") != []


def test_an_account_made_a_moment_ago_is_waited_for(project: EmulatedProject) -> None:
    words = "Service account x does not exist."
    project.inject_fault(kind="http", status=400, match=f"POST /{POLICY}:setIamPolicy", times=2, message=words)
    project.create_shared()
    assert project.clock.sleeps.count(project.context.poll_seconds) >= 2


def test_roles_are_bound_again_and_others_left(project: EmulatedProject) -> None:
    project.create_shared()
    policy = project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {})
    policy["bindings"] = [ADMIN]
    project.cloud.call_ok("POST", f"{POLICY}:setIamPolicy", {"policy": policy})
    assert project.planned_actions() == {f"roles of/{project.tag}-sa": "create"}
    project.create_shared()
    assert ADMIN in project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {})["bindings"]
    destroy(project.shared_resources(), project.context)
    assert project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {})["bindings"] == [ADMIN]


CONDITIONAL = {"role": "a", "members": ["m"], "condition": {"title": "until May"}}


@pytest.mark.parametrize(
    ("before", "to", "after"),
    [
        ([], {"a"}, [{"role": "a", "members": ["m"]}]),
        ([{"role": "a", "members": ["x"]}], {"a"}, [{"role": "a", "members": ["x", "m"]}]),
        ([{"role": "a", "members": ["x", "m"]}], {"a"}, [{"role": "a", "members": ["x", "m"]}]),
        ([{"role": "a", "members": ["m", "x"]}], set(), [{"role": "a", "members": ["x"]}]),
        ([{"role": "a", "members": ["m"]}, {"role": "c", "members": ["m"]}], set(), [{"role": "c", "members": ["m"]}]),
        ([CONDITIONAL], {"a"}, [CONDITIONAL, {"role": "a", "members": ["m"]}]),
        ([CONDITIONAL], set(), [CONDITIONAL]),
    ],
)
def test_bindings_of_others_and_conditions_stay(before: list[Any], to: set[str], after: list[Any]) -> None:
    assert rebind(before, "m", of={"a", "b"}, to=to) == after


def lookup(project: EmulatedProject, method: str) -> str:
    return f"{method} /iam/v1/{PROJECT}/serviceAccounts"


def test_an_account_that_iam_answers_403_for_is_looked_up_in_the_list(project: EmulatedProject) -> None:
    """IAM hides whether an account exists behind a 403, even from an owner."""
    project.inject_fault(kind="http", status=403, match=lookup(project, "GET") + "/.+", times=99)
    project.create_shared()
    account = f"{project.tag}-sa@slipway-local.iam.gserviceaccount.com"
    assert on_project(project, account) == ["roles/logging.logWriter", "roles/tpu.admin"]
    assert project.planned_actions() == {}


def test_an_account_that_cannot_be_looked_up_is_created_and_gets_its_roles(project: EmulatedProject) -> None:
    project.inject_fault(kind="http", status=403, match=lookup(project, "GET"), times=99)
    project.create_shared()
    account = f"{project.tag}-sa@slipway-local.iam.gserviceaccount.com"
    assert on_project(project, account) == ["roles/logging.logWriter", "roles/tpu.admin"]
    assert on_bucket(project, account) == ["roles/storage.legacyBucketReader", "roles/storage.objectAdmin"]


def test_an_account_that_may_neither_be_read_nor_created_is_left_to_an_admin(project: EmulatedProject) -> None:
    for method in ("GET", "POST"):
        project.inject_fault(kind="http", status=403, match=lookup(project, method), times=99)
    project.create_shared()
    notes = "\n".join(project.notes)
    assert f"run `gcloud iam service-accounts create {project.tag}-sa --project=slipway-local`" in notes
    assert "gcloud projects add-iam-policy-binding slipway-local" in notes


def test_a_new_account_that_is_not_visible_yet_is_waited_for(project: EmulatedProject) -> None:
    project.inject_fault(kind="http", status=404, match=lookup(project, "GET") + "/.+", times=5)
    project.create_shared()
    log = project.cloud.request_log()
    created = [r["status"] for r in log if r["method"] == "POST" and r["path"].endswith("/serviceAccounts")]
    assert created[-1:] == [200]
    assert project.planned_actions() == {}


def test_the_wildcard_project_hides_whether_an_account_exists(project: EmulatedProject) -> None:
    nobody = "nobody@slipway-local.iam.gserviceaccount.com"
    assert project.cloud.call("GET", f"iam/v1/projects/-/serviceAccounts/{nobody}")[0] == 403
    assert project.cloud.call("GET", f"iam/v1/{PROJECT}/serviceAccounts/{nobody}")[0] == 404

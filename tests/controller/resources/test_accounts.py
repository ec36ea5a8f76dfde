"""The workers' account and its roles: least privilege, given accounts, and callers who may not set IAM."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.errors import CloudError, ConfigError
from controller.reconcile.reconciler import destroy
from controller.resources.accounts import rebind
from tests.controller.localcloud.harness import PROJECT
from tests.controller.resources.conftest import EmulatedProject

POLICY = f"cloudresourcemanager/v1/{PROJECT}"
COMPUTE_ACCOUNT = "314159265358-compute@developer.gserviceaccount.com"
ADMIN = {"role": "roles/owner", "members": ["user:a@example.com"]}


def roles(project: EmulatedProject, account: str) -> tuple[list[str], list[str]]:
    """Of an account on the project and on the bucket."""
    account = account or f"{project.tag}-sa@slipway-local.iam.gserviceaccount.com"
    on_project = project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {})
    on_bucket = project.cloud.call_ok("GET", f"storage/v1/b/{project.tag}-bucket/iam")
    found = [
        sorted(b["role"] for b in policy["bindings"] if f"serviceAccount:{account}" in b["members"])
        for policy in (on_project, on_bucket)
    ]
    return found[0], found[1]


OURS = (
    ["roles/logging.logWriter", "roles/tpu.admin"],
    ["roles/storage.legacyBucketReader", "roles/storage.objectAdmin"],
)


def test_the_account_has_few_roles_and_those_on_objects_are_on_the_bucket_alone(project: EmulatedProject) -> None:
    project.create_shared()
    assert roles(project, "") == OURS
    policy = project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {})
    policy["bindings"] = [ADMIN]
    project.cloud.call_ok("POST", f"{POLICY}:setIamPolicy", {"policy": policy})
    assert project.planned_actions() == {f"roles of/{project.tag}-sa": "create"}
    project.create_shared()
    assert ADMIN in project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {})["bindings"]
    destroy(project.shared_resources(), project.context)
    assert project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {})["bindings"] == [ADMIN]


ACCOUNTS = f"/iam/v1/{PROJECT}/serviceAccounts"
ANSWERS: dict[str, dict[str, Any]] = {
    # IAM hides whether an account exists behind a 403, even from an owner.
    "it is looked up in the list": {"status": 403, "match": f"GET {ACCOUNTS}/.+", "times": 99},
    "it is created unseen": {"status": 403, "match": f"GET {ACCOUNTS}", "times": 99},
    "it is not visible yet": {"status": 404, "match": f"GET {ACCOUNTS}/.+", "times": 5},
    "another writes at the same time": {"status": 409, "match": f"POST /{POLICY}:setIamPolicy", "times": 3},
    "it was made a moment ago": {
        "status": 400, "match": f"POST /{POLICY}:setIamPolicy", "times": 2,
        "message": "Service account x does not exist.",
    },
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_account_is_made_and_gets_its_roles_whatever_iam_answers_at_first(
    project: EmulatedProject, answer: dict[str, Any]
) -> None:
    project.inject_fault(kind="http", **answer)
    project.create_shared()
    assert roles(project, "") == OURS
    if answer["match"] != f"GET {ACCOUNTS}":
        assert project.planned_actions() == {}


@pytest.mark.parametrize("account", ["default", COMPUTE_ACCOUNT])
def test_to_an_account_that_we_did_not_make_nothing_is_bound(project: EmulatedProject, account: str) -> None:
    before = project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {})
    observed = project.create_shared(f"cloud.service_account={account}")
    assert observed[f"service account/{account}"].email(project.context) == COMPUTE_ACCOUNT
    assert project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {}) == before
    assert roles(project, COMPUTE_ACCOUNT)[1] == []
    destroy(project.shared_resources(f"cloud.service_account={account}"), project.context)
    assert project.cloud.call("GET", f"iam/v1/{PROJECT}/serviceAccounts/{COMPUTE_ACCOUNT}")[0] == 200


def test_an_account_made_by_hand_is_used_and_kept_and_nothing_is_bound(project: EmulatedProject) -> None:
    made = {"accountId": f"{project.tag}-sa", "serviceAccount": {"displayName": "mine"}}
    account = project.cloud.call_ok("POST", f"iam/v1/{PROJECT}/serviceAccounts", made)
    project.create_shared()
    assert roles(project, account["email"])[0] == []
    destroy(project.shared_resources(), project.context)
    assert project.cloud.call_ok("GET", f"iam/v1/{PROJECT}/serviceAccounts/{account['email']}") == account


def test_an_account_that_does_not_exist_is_said(project: EmulatedProject) -> None:
    absent = "nobody-x@slipway-local.iam.gserviceaccount.com"
    with pytest.raises(ConfigError, match=f"{absent} does not exist; set cloud.service_account"):
        project.create_shared(f"cloud.service_account={absent}")
    # The wildcard project hides whether an account exists.
    assert project.cloud.call("GET", f"iam/v1/projects/-/serviceAccounts/{absent}")[0] == 403
    assert project.cloud.call("GET", f"iam/v1/{PROJECT}/serviceAccounts/{absent}")[0] == 404


@pytest.mark.parametrize("refused", ["getIamPolicy", "setIamPolicy", "serviceAccounts"])
def test_who_may_not_set_iam_goes_on_with_a_note_of_what_an_admin_would_run(
    project: EmulatedProject, refused: str
) -> None:
    """An account that may neither be read nor created is left to an admin, too."""
    account = f"{project.tag}-sa@slipway-local.iam.gserviceaccount.com"
    for match in [f"POST /{POLICY}:{refused}"] if "Policy" in refused else [f"{m} {ACCOUNTS}" for m in ("GET", "POST")]:
        project.inject_fault(kind="http", status=403, match=match, times=2 if "Policy" in refused else 99)
    project.create_shared()
    notes = "\n".join(project.notes)
    assert "ask a project admin" in notes
    assert (
        "gcloud projects add-iam-policy-binding slipway-local --condition=None "
        f"--member=serviceAccount:{account} --role=roles/logging.logWriter"
    ) in notes
    create = f"run `gcloud iam service-accounts create {project.tag}-sa --project=slipway-local`"
    assert (create in notes) == (refused == "serviceAccounts")
    project.cloud.call_ok("DELETE", "emulator/faults")
    assert (roles(project, account)[1] != []) == (refused != "serviceAccounts")


def test_who_may_not_create_accounts_is_told_what_else_to_do(project: EmulatedProject) -> None:
    project.inject_fault(kind="http", status=403, match=f"POST {ACCOUNTS}$")
    with pytest.raises(CloudError, match=r"gcloud iam service-accounts create .*`default`: the Compute Engine account"):
        project.create_shared()


CONDITIONAL = {"role": "a", "members": ["m"], "condition": {"title": "until May"}}


@pytest.mark.parametrize(
    ("before", "to", "after"),
    [
        ([], {"a"}, [{"role": "a", "members": ["m"]}]),
        ([{"role": "a", "members": ["x"]}], {"a"}, [{"role": "a", "members": ["x", "m"]}]),
        ([{"role": "a", "members": ["m", "x"]}], set(), [{"role": "a", "members": ["x"]}]),
        ([{"role": "a", "members": ["m"]}, {"role": "c", "members": ["m"]}], set(), [{"role": "c", "members": ["m"]}]),
        ([CONDITIONAL], {"a"}, [CONDITIONAL, {"role": "a", "members": ["m"]}]),
    ],
)
def test_bindings_of_others_and_conditions_stay(before: list[Any], to: set[str], after: list[Any]) -> None:
    assert rebind(before, "m", of={"a", "b"}, to=to) == after

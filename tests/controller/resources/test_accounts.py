"""Service accounts and their roles: made, changed, deleted, and what a caller without permission is told."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.errors import CloudError, ConfigError
from controller.gcp.answers import OperationFailedError
from controller.reconcile import Diff, VanishedError, destroy
from controller.resources.accounts import (
    AccountRoles,
    BastionRoles,
    BucketRoles,
    ProjectRoles,
    Roles,
    ServiceAccount,
    rebind,
)
from tests.controller.localcloud.harness import COMPUTE, PROJECT, REGION
from tests.controller.resources.conftest import EmulatedProject
from tests.fakes.context import make_context

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


def test_an_account_that_is_made_again_gets_its_roles_again(project: EmulatedProject) -> None:
    project.create_shared()
    email = f"{project.tag}-sa@slipway-local.iam.gserviceaccount.com"
    project.cloud.call_ok("DELETE", f"iam/v1/{PROJECT}/serviceAccounts/{email}")
    project.context.known_accounts.clear()
    members = str(project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {}))
    assert f"deleted:serviceAccount:{email}?uid=" in members
    project.create_shared()
    assert roles(project, "") == OURS
    assert f"deleted:serviceAccount:{email}" not in str(project.cloud.call_ok("POST", f"{POLICY}:getIamPolicy", {}))
    destroy(project.shared_resources(), project.context)


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


@pytest.mark.parametrize("kind", [ProjectRoles, BucketRoles])
def test_roles_of_an_account_that_is_deleted_meanwhile_are_looked_at_again_at_once(
    project: EmulatedProject, kind: type[Roles]
) -> None:
    """As by somebody's `down --all`; what is waited for is a new account only."""
    project.create_shared()
    [bound] = [each for each in project.shared_resources() if type(each) is kind]
    project.cloud.call_ok("DELETE", f"iam/v1/{PROJECT}/serviceAccounts/{bound.account.email(project.context)}")
    project.context.known_accounts.clear()
    with pytest.raises(VanishedError, match="does not exist"):
        bound.apply(project.context, {}, Diff("create"))
    project.create_shared()
    assert roles(project, "") == OURS
    destroy(project.shared_resources(), project.context)


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


MINE: dict[str, Any] = {"name": "sa", "account": ServiceAccount(name="sa"), "roles": ("a",)}
VERSION = {"optionsRequestedPolicyVersion": 3}


@pytest.mark.parametrize(
    ("kind", "methods", "where", "version", "command"),
    [
        (ProjectRoles(**MINE), "cloudresourcemanager projects", {"resource": "p"},
         {"body": {"options": {"requestedPolicyVersion": 3}}}, "projects add-iam-policy-binding p --condition=None"),
        (BucketRoles(**MINE, on="b"), "storage buckets", {"bucket": "b"}, VERSION,
         "storage buckets add-iam-policy-binding gs://b"),
        (AccountRoles(**MINE, on="workers"), "iam projects.serviceAccounts",
         {"resource": "projects/p/serviceAccounts/workers@p.iam.gserviceaccount.com"},
         {"options_requestedPolicyVersion": 3},
         "iam service-accounts add-iam-policy-binding workers@p.iam.gserviceaccount.com"),
        (BastionRoles(**MINE, on="vm", zone="z"), "compute instances", {"project": "p", "zone": "z", "resource": "vm"},
         VERSION, "compute instances add-iam-policy-binding vm --zone=z"),
    ],
)  # fmt: skip
def test_a_policy_is_read_and_written_by_the_methods_of_its_api(
    kind: Roles, methods: str, where: dict[str, str], version: dict[str, Any], command: str
) -> None:
    """Cloud Storage alone takes the policy as the whole body."""
    sent: list[tuple[str, dict[str, Any]]] = []

    def call(api: str, method: str, **parameters: Any) -> dict[str, Any]:
        sent.append((f"{api} {method}", parameters))
        return {"etag": "e"}

    context = make_context(SimpleNamespace(call=call))
    kind.apply(context, {}, Diff("create"))
    bound = [{"role": "a", "members": ["serviceAccount:sa@p.iam.gserviceaccount.com"]}]
    policy = {"etag": "e", "bindings": bound, "version": 3}
    body = policy if isinstance(kind, BucketRoles) else {"policy": policy}
    assert sent == [(f"{methods}.getIamPolicy", where | version), (f"{methods}.setIamPolicy", where | {"body": body})]
    assert kind.gcloud_binding(context) == command


CONDITIONAL = {"role": "a", "members": ["m"], "condition": {"title": "until May"}}


@pytest.mark.parametrize(
    ("before", "to", "after"),
    [
        ([], {"a"}, [{"role": "a", "members": ["m"]}]),
        ([{"role": "a", "members": ["x"]}], {"a"}, [{"role": "a", "members": ["x", "m"]}]),
        ([{"role": "a", "members": ["m", "x"]}], set(), [{"role": "a", "members": ["x"]}]),
        ([{"role": "a", "members": ["m"]}, {"role": "c", "members": ["m"]}], set(), [{"role": "c", "members": ["m"]}]),
        ([CONDITIONAL], {"a"}, [CONDITIONAL, {"role": "a", "members": ["m"]}]),
        (
            [{"role": role, "members": ["deleted:m?uid=1", "deleted:mm?uid=2"]} for role in ("a", "c")],
            {"a"},
            [
                {"role": "a", "members": ["deleted:mm?uid=2", "m"]},
                {"role": "c", "members": ["deleted:m?uid=1", "deleted:mm?uid=2"]},
            ],
        ),
    ],
)
def test_bindings_of_others_and_conditions_stay(before: list[Any], to: set[str], after: list[Any]) -> None:
    assert rebind(before, "m", of={"a", "b"}, to=to) == after


REGIONAL = f"{COMPUTE}/regions/{REGION}"
NAT = {"natIpAllocateOption": "AUTO_ONLY", "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}


def given(project: EmulatedProject) -> list[str]:
    return ["cloud.service_account=default", f"network.subnet={project.tag}-tpus"]


def by_admin(project: EmulatedProject, *, without: str = "") -> None:
    """A network with all that a pod needs, but for one part."""
    link = f"{PROJECT}/global/networks/{project.tag}"
    subnet = {"name": "TAG-tpus", "network": link, "ipCidrRange": "10.3.0.0/20", "privateIpGoogleAccess": True}
    everything: dict[str, tuple[str, dict[str, Any]]] = {
        "network": (f"{COMPUTE}/global/networks", {"name": project.tag, "autoCreateSubnetworks": False}),
        "subnet": (f"{REGIONAL}/subnetworks", subnet),
        "router": (f"{REGIONAL}/routers", {"name": project.tag, "network": link, "nats": [{"name": "out", **NAT}]}),
        "ssh": (f"{COMPUTE}/global/firewalls", rule("ssh", link, "tcp", "0.0.0.0/0", ["22"])),
        "inside": (f"{COMPUTE}/global/firewalls", rule("inside", link, "all", "10.0.0.0/8")),
    }
    project.cloud.call_ok(
        "POST", "storage/v1/b?project=slipway-local", {"name": f"{project.tag}-bucket", "location": REGION}
    )
    apis = {"serviceIds": list(project.config().cloud.apis)}
    project.cloud.call_ok("POST", f"serviceusage/v1/{PROJECT}/services:batchEnable", apis)
    for part, (path, body) in everything.items():
        if part == without:
            return  # what comes later needs it
        project.cloud.call_and_wait("POST", path, {**body, "name": body["name"].replace("TAG", project.tag)})


def rule(name: str, link: str, protocol: str, source: str, ports: list[str] | None = None) -> dict[str, Any]:
    allowed = {"IPProtocol": protocol, **({"ports": ports} if ports else {})}
    return {"name": f"TAG-{name}", "network": link, "allowed": [allowed], "sourceRanges": [source]}


def may_not(project: EmulatedProject, match: str) -> None:
    project.inject_fault(kind="http", status=403, match=f"^POST /{match}$", message="Required permission")


def test_what_an_admin_made_is_enough(project: EmulatedProject) -> None:
    by_admin(project)
    before, told = project.state(), len(project.cloud.request_log())
    may_not(project, f"{COMPUTE}/global/firewalls")  # the rule for the inside; there is one that does as well
    project.create_shared(*given(project))
    assert project.planned_actions(*given(project)) == {}
    assert [r["status"] for r in project.cloud.request_log()[told:] if r["mutating"]] == [403]
    assert project.state() == before


@pytest.mark.parametrize(
    ("without", "path", "command"),
    [
        ("network", f"{COMPUTE}/global/networks", "gcloud compute networks create TAG --subnet-mode=custom --mtu=8896"),
        (
            "subnet",
            f"{REGIONAL}/subnetworks",
            f"gcloud compute networks subnets create TAG-tpus --network=TAG --region={REGION} --range=10.64.176.0/20 "
            "--enable-private-ip-google-access",
        ),
        (
            "router",
            f"{REGIONAL}/routers",
            f"gcloud compute routers create TAG-{REGION} --network=TAG --region={REGION} --project=slipway-local && "
            f"gcloud compute routers nats create TAG-{REGION} --router=TAG-{REGION} ",
        ),
        (
            "inside",
            f"{COMPUTE}/global/firewalls",
            f"gcloud compute firewall-rules create TAG-allow-internal-{REGION} --allow=icmp,tcp,udp "
            "--source-ranges=10.3.0.0/20 --network=TAG",
        ),
    ],
)
def test_what_is_missing_is_told_as_the_command_for_an_admin(
    project: EmulatedProject, without: str, path: str, command: str
) -> None:
    by_admin(project, without=without)
    may_not(project, path)
    words = re.escape(command.replace("TAG", project.tag))
    with pytest.raises(CloudError, match=rf"you may not create it \(Required permission\); ask .* `{words}"):
        project.create_shared(*given(project))


def test_private_access_that_may_not_be_switched_on_is_a_note(project: EmulatedProject) -> None:
    by_admin(project)
    where = f"{REGIONAL}/subnetworks/{project.tag}-tpus"
    project.cloud.call_and_wait("POST", f"{where}/setPrivateIpGoogleAccess", {"privateIpGoogleAccess": False})
    may_not(project, f"{where}/setPrivateIpGoogleAccess")
    project.create_shared(*given(project))
    [note] = [note for note in project.notes if "private Google access is off" in note]
    assert f"gcloud compute networks subnets update {project.tag}-tpus --region={REGION} --enable-private-ip" in note


def test_an_operation_that_fails_late_is_told_with_its_reason(project: EmulatedProject) -> None:
    """Compute accepts the request, and its operation ends with an error."""
    answer = {"name": "o", "status": "DONE", "operationType": "insert"}
    answer["error"] = {"errors": [{"code": "QUOTA_EXCEEDED", "message": "Quota 'NETWORKS' exceeded. Limit: 5.0"}]}  # pyright: ignore[reportArgumentType]
    call = project.context.google.call

    def quota(api: str, method: str, **parameters: Any) -> dict[str, Any]:
        return answer if method == "networks.insert" else call(api, method, **parameters)

    project.context.google.call = quota  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OperationFailedError, match=r"compute insert: 0 QUOTA_EXCEEDED: Quota 'NETWORKS' exceeded"):
        project.create_shared()

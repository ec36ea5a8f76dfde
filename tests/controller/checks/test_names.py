"""A missing permission of the caller is found, and named, before anything is made."""

import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
from google.oauth2.credentials import Credentials

from conf.schema.config import Config
from controller.checks.names import TUNNEL, caller_has_permissions, roles_exist
from controller.checks.preflight import _ask
from controller.context import Context
from controller.core.events import Events
from controller.core.finding import Finding
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.localcloud import lifecycle
from controller.plan.needed_permissions import CHANGE, MAKE, Need, permissions_of_plan
from controller.ssh.login import Login
from tests.composed import config_of as config
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.controller.localcloud.harness import PROJECT, EmulatedCloud
from tests.emulators import Emulators
from tests.paths import ROOT

WORDS = ("+experiment=quickstart", "cloud=local")
GRANT = 'gcloud projects add-iam-policy-binding slipway-local --member="user:$(gcloud config get account)" --role='
BUCKET = "slipway-local-slipway-us-central1"


def config_of(*overrides: str) -> Config:
    return config(*WORDS, *overrides)


NEEDS = permissions_of_plan(config_of(), "slipway-local")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, emulators: Emulators) -> Iterator[EmulatedCloud]:
    """A project with a bucket and without anything else."""
    made = EmulatedCloud(tmp_path_factory.mktemp("cloud") / "state")
    assert emulators.start(made.state, "--operation-seconds=0") == (0, "")
    made.establish()
    made.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": BUCKET, "location": "us-central1"})
    yield made
    lifecycle.wipe(made.state)


@pytest.fixture
def cloud(shared: EmulatedCloud) -> Iterator[EmulatedCloud]:
    roles = shared.call_ok("GET", "emulator/settings")["caller_roles"]
    yield shared
    shared.call_ok("DELETE", "emulator/faults")
    shared.call_ok("POST", "emulator/settings", {"caller_roles": roles})


@pytest.fixture(scope="module")
def context(shared: EmulatedCloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    endpoint, clock = shared.endpoint, Clock()
    credentials = Credentials(token=endpoint["token"], quota_project_id="slipway-local")
    google = GoogleClient(credentials, clock, endpoint["roots"])
    folder = tmp_path_factory.mktemp("home")
    login = Login(google, clock, "slipway-local", "me", folder)
    yield Context("slipway-local", google, clock, Events(clock), folder, login, 0.01, cast(Any, None))
    google.close()


def findings(context: Context, *overrides: str) -> list[Finding]:
    answer = _ask(caller_has_permissions, config_of(*overrides), context)
    return [*answer.findings, *([Finding("credentials", "warning", "cloud", answer.unknown)] if answer.unknown else [])]


def test_an_owner_lacks_nothing(cloud: EmulatedCloud, context: Context) -> None:
    assert findings(context) == []
    assert findings(context, "cloud.bucket=not-yet-there") == [], "a new bucket will let its project's owner in"


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.permission)
def test_a_caller_who_lacks_one_permission_is_told_which(cloud: EmulatedCloud, context: Context, need: Need) -> None:
    fault = {"kind": "denied", "permission": need.permission}
    cloud.call_ok("POST", "emulator/faults", {"key": need.permission, "faults": [fault]})
    before = [entry for entry in cloud.request_log() if entry["mutating"]]
    [found] = findings(context)
    assert need.permission in found.message
    sure = need.permission in (*(f"tpu.nodes.{verb}" for verb in ("create", "delete", "get", "list")), TUNNEL)
    check = "credentials" if need.permission == "serviceusage.services.use" else "permissions"  # of every request
    assert (found.check, found.severity) == (check, "error" if sure else "warning")
    assert [entry for entry in cloud.request_log() if entry["mutating"]] == before


OF_OBJECTS = [need for need in NEEDS if need.kind == "bucket" and need.permission not in ("storage.buckets.delete",)]


@pytest.mark.parametrize("lacking", OF_OBJECTS, ids=lambda need: need.permission)
def test_the_bucket_need_not_exist_for_that(cloud: EmulatedCloud, context: Context, lacking: Need) -> None:
    """A caller with a custom role gets nothing from the policy of a new bucket."""
    held = sorted({need.permission for need in NEEDS} - {lacking.permission})
    role = f"complete_but_for_{lacking.permission.replace('.', '_')}"
    cloud.call_ok("POST", f"iam/v1/{PROJECT}/roles", {"roleId": role, "role": {"includedPermissions": held}})
    cloud.call_ok("POST", "emulator/settings", {"caller_roles": [f"{PROJECT}/roles/{role}"]})
    [found] = findings(context, "cloud.bucket=not-yet-there")
    assert lacking.permission in found.message
    assert "on bucket not-yet-there" in found.message


def test_an_editor_is_told_what_editors_lack(cloud: EmulatedCloud, context: Context) -> None:
    cloud.call_ok("POST", "emulator/settings", {"caller_roles": ["roles/editor"]})
    messages = {found.message for found in findings(context)}
    assert messages == {
        "you lack iap.tunnelInstances.accessViaIAP in slipway-local, for: SSH through IAP; "
        f"roles/iap.tunnelResourceAccessor has it: `{GRANT}roles/iap.tunnelResourceAccessor`",
        "you lack resourcemanager.projects.setIamPolicy in slipway-local, for: roles in the project (unless that "
        f"exists); roles/resourcemanager.projectIamAdmin has it: `{GRANT}roles/resourcemanager.projectIamAdmin`",
    }


def test_a_right_on_the_service_account_alone_is_enough(cloud: EmulatedCloud, context: Context) -> None:
    cloud.call_ok("POST", f"iam/v1/{PROJECT}/serviceAccounts", {"accountId": "given-runner"})
    email = "given-runner@slipway-local.iam.gserviceaccount.com"
    binding = {"role": "roles/iam.serviceAccountUser", "members": ["user:you@example.com"]}
    viewer = ["roles/viewer", "roles/serviceusage.serviceUsageConsumer"]
    path = f"iam/v1/{PROJECT}/serviceAccounts/{email}:setIamPolicy"
    cloud.call_ok("POST", path, {"policy": {"bindings": [binding]}})
    cloud.call_ok("POST", "emulator/settings", {"caller_roles": viewer})

    def asks_for_act_as(*overrides: str) -> bool:
        return any("iam.serviceAccounts.actAs" in found.message for found in findings(context, *overrides))

    assert asks_for_act_as()
    assert not asks_for_act_as(f"cloud.service_account={email}")


def test_the_budget_is_asked_of_its_billing_account(cloud: EmulatedCloud, context: Context) -> None:
    budget = "cloud.billing_budget={account: 012345-6789AB-CDEF01, usd: 100, thresholds: [0.5]}"
    assert findings(context, budget) == []
    cloud.call_ok("POST", "emulator/settings", {"caller_roles": ["roles/owner"]})
    found = " ".join(finding.message for finding in findings(context, budget))
    assert "billing.budgets.create on billing account 012345-6789AB-CDEF01" in found


def test_a_plan_goes_on_without_what_the_caller_may_not_see(slipway: SlipwayCli) -> None:
    EmulatedCloud(slipway.cloud().state).establish()
    before = slipway.mutations()
    roles = "cloud.caller_roles=[roles/tpu.admin,roles/serviceusage.serviceUsageConsumer]"
    code, out, err = slipway("plan", ECHO_COMMAND, roles)
    assert (code, err) == (0, "")
    assert "? unknown  network" in out
    assert "unknown: Required 'compute.networks.get' permission for 'projects/slipway-local'" in out
    assert re.search(
        r"warning: cloud.project: you lack .*compute\.networks\.get.* in slipway-local, for: .*network", out
    )
    assert "roles/compute.networkAdmin has it" in out
    assert slipway.mutations() == before


def names(*overrides: str) -> set[str]:
    return {need.permission for need in permissions_of_plan(config_of(*overrides), "p")}


PLAIN = {need.permission for need in NEEDS}


def test_only_what_the_plan_uses_is_asked_for() -> None:
    less = names("ssh.method=internal", "network.nat=false", "cloud.service_account=default")
    assert {"iap.tunnelInstances.accessViaIAP", "compute.routers.create", "iam.serviceAccounts.create"} <= PLAIN - less
    assert "resourcemanager.projects.setIamPolicy" in PLAIN - less
    plan = permissions_of_plan(config_of("tpu.adopt=true", "tpu.name=theirs"), "p")
    adopted = {need.permission: need for need in plan}
    assert not {"compute.networks.create", "tpu.nodes.delete", "iam.serviceAccounts.actAs"} & set(adopted)
    assert adopted["tpu.nodes.update"].when == MAKE  # an own pod's key is there from the start


@pytest.mark.parametrize(
    ("permission", "part"),
    [
        ("tpu.nodes.update", "pod"),
        ("tpu.nodes.stop", "pod"),
        ("tpu.nodes.start", "pod"),
        ("storage.buckets.update", "bucket"),
        ("compute.firewalls.update", "firewall rules"),
        ("compute.subnetworks.update", "subnet"),
        ("compute.subnetworks.setPrivateIpGoogleAccess", "subnet"),
    ],
)
def test_what_changes_an_existing_resource_is_listed_as_such(permission: str, part: str) -> None:
    [need] = [need for need in NEEDS if need.permission == permission]
    assert (need.when, list(need.parts)) == (CHANGE, [part])


def test_each_part_of_a_larger_plan_adds_what_it_uses() -> None:
    secret = "env.secrets.A=secretmanager:projects/p/secrets/a"
    needs = permissions_of_plan(config_of("recovery.driver=bastion", "tpu.data_disk_gb=100", secret), "p")
    assert {
        "compute.instances.create", "iam.serviceAccounts.setIamPolicy", "compute.disks.setLabels",
        "secretmanager.versions.access",
    } <= {need.permission for need in needs} - PLAIN  # fmt: skip
    accounts = [need.name for need in needs if need.permission == "iam.serviceAccounts.actAs"]
    assert accounts == ["slipway-driver", "slipway-runner"]
    assert [need.permission for need in (*NEEDS, *needs) if not need.role] == []


def test_the_page_of_the_first_run_lists_the_roles() -> None:
    page = (ROOT / "docs" / "first-run.md").read_text()
    listed = re.findall(r"^\| `(roles/[\w.]+)`", page, re.MULTILINE)
    assert sorted(listed) == sorted({need.role for need in NEEDS})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["cloud.roles=[roles/tpu.admni]"],
            ["cloud.roles: roles/tpu.admni is probably misspelled; did you mean roles/tpu.admi"],
        ),
        (["cloud.bucket_roles=[roles/storage.objectadmin]"], ["did you mean roles/storage.objectAdmin?"]),
        (["cloud.roles=[roles/storage.objectUser,roles/artifactregistry.reader,roles/logging.admin]"], []),
        (["cloud.roles=[roles/compute.instanceAdmin,projects/p/roles/tpuAdmin]"], []),
    ],
)
def test_a_role_that_is_misspelled_is_told(words: list[str], told: list[str]) -> None:
    issues = roles_exist.function(config("cloud=local", *words))
    found = [f"{issue.key}: {issue.message}" for issue in issues]
    assert len(found) == len(told)
    assert all(part in said for part, said in zip(told, found, strict=True))

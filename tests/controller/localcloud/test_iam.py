"""Who may do what in the emulated cloud: roles, policies, scopes and quota projects, without a server."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from conf.schema.cloud import all_permissions, has_method, permissions_of_role, predefined_roles
from controller.localcloud import iam as policy_module
from controller.localcloud.faults.faults import Faults
from controller.localcloud.http.call import DEFAULT_ACCOUNT
from controller.localcloud.http.discovery import Discovery, Method
from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam import LAPTOP, PROJECT_RESOURCE, Caller, Judge, Judgement, Policies, bucket_bindings
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store

RUNNER = "runner@slipway-local.iam.gserviceaccount.com"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


class Iam:
    """Policies and a judge on a store of their own, with a node whose service account is `RUNNER`."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "state.db")
        self.settings = Settings(self.store, operation_seconds=0)
        self.policies = Policies(self.store, self.settings)
        self.judge = Judge(self.store, self.policies, self.settings, Faults(self.store))
        self.store.put("serviceAccount", RUNNER, {})
        self.store.put("node", "n", {"id": "7", "serviceAccount": {"email": RUNNER, "scope": [SCOPE]}})
        self.store.put("bucket", "b", {})

    def judgement(self, client: str = LAPTOP, api: str = "tpu") -> Judgement:
        return Judgement(self.judge, self.judge.caller(client), api)

    def grant(self, resource: str, member: str, *roles: str) -> None:
        bindings = [{"role": role, "members": [member]} for role in roles]
        self.policies.set(resource, {"bindings": bindings}, conflict=409)

    def persona(self, *roles: str) -> Caller:
        self.settings.update({"caller_roles": list(roles)})
        return self.judge.caller(LAPTOP)


@pytest.fixture
def iam(tmp_path: Path) -> Iam:
    return Iam(tmp_path)


def call(judgement: Judgement, name: str, quota_project: str | None = None, **path: str) -> ApiError | None:
    """The refusal of a method of an API, `tpu.v2:projects.locations.nodes.get`, if it is refused."""
    document, _, method = name.partition(":")
    try:
        judgement.admit(Method(document, method, "GET", None, None, {}, (SCOPE,)), path, quota_project)
    except ApiError as refusal:
        return refusal
    return None


def test_an_editor_lacks_what_google_keeps_from_editors() -> None:
    lacking = {
        "resourcemanager.projects.setIamPolicy", "iam.serviceAccounts.setIamPolicy", "iap.tunnelInstances.accessViaIAP",
        "secretmanager.versions.access", "iam.roles.create", "storage.objects.get", "storage.buckets.get",
    }  # fmt: skip
    assert lacking & permissions_of_role("roles/editor") == set()
    assert lacking - permissions_of_role("roles/owner") == {"storage.objects.get", "storage.buckets.get"}
    assert {"tpu.nodes.create", "compute.networks.create", "iam.serviceAccounts.actAs"} <= permissions_of_role(
        "roles/editor"
    )


def test_every_role_of_the_table_contains_something_known() -> None:
    empty = [role for role in predefined_roles() if not permissions_of_role(role)]
    assert empty == ["roles/monitoring.metricWriter"]
    assert not any(permission.endswith("*") for permission in all_permissions())


def test_the_permissions_of_every_emulated_method_are_known(tmp_path: Path) -> None:
    import asyncio

    from controller.localcloud import cloud as parts

    store = Store(tmp_path / "state.db")
    made = parts.assemble(store, tmp_path, "http://127.0.0.1:1/", "token", Settings(store), asyncio.Event())
    exists: set[str] = set()

    def collect(segment: Any) -> None:
        exists.update(method.key for method in segment.methods.values())
        for child in (*segment.literals.values(), *segment.parameters.values()):
            collect(child)

    collect(Discovery()._root)
    asked = [key for key in made.server.handlers if key in exists]
    assert len(asked) > 100
    unknown = [key for key in asked if not has_method(key.partition(".")[0], key.partition(":")[2])]
    assert unknown == []


@pytest.mark.parametrize(
    ("role", "method", "allowed"),
    [
        ("roles/owner", "tpu.v2:projects.locations.nodes.create", True),
        ("roles/viewer", "tpu.v2:projects.locations.nodes.create", False),
        ("roles/viewer", "tpu.v2:projects.locations.nodes.list", True),
        ("roles/tpu.viewer", "tpu.v2:projects.locations.queuedResources.delete", False),
        ("roles/tpu.admin", "tpu.v2alpha1:projects.locations.queuedResources.delete", True),
        ("roles/tpu.admin", "compute.v1:networks.get", False),
        ("roles/editor", "cloudresourcemanager.v1:projects.setIamPolicy", False),
        ("roles/resourcemanager.projectIamAdmin", "cloudresourcemanager.v3:projects.setIamPolicy", True),
    ],
)
def test_a_caller_may_do_what_the_roles_contain(iam: Iam, role: str, method: str, allowed: bool) -> None:
    iam.persona(role)
    api = method.partition(".")[0]
    refusal = call(iam.judgement(api=api), method)
    assert (refusal is None) == allowed
    assert refusal is None or refusal.code == 403


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        (
            "tpu.v2:projects.locations.nodes.delete", {},
            "Permission 'tpu.nodes.delete' denied on resource '//tpu.googleapis.com/projects/slipway-local' "
            "(or it may not exist).",
        ),
        (
            "storage.v1:objects.insert", {"bucket": "b"},
            "you@example.com does not have storage.objects.create access to the Google Cloud Storage object.",
        ),
        (
            "compute.v1:networks.insert", {},
            "Required 'compute.networks.create' permission for 'projects/slipway-local'",
        ),
    ],
)  # fmt: skip
def test_a_refusal_has_googles_words(iam: Iam, method: str, path: dict[str, str], words: str) -> None:
    iam.persona("roles/viewer")
    refusal = call(iam.judgement(api=method.partition(".")[0]), method, **path)
    assert refusal is not None
    assert refusal.message.startswith(words)
    assert "tpu" not in method or refusal.details[0]["reason"] == "IAM_PERMISSION_DENIED"


def test_owners_and_editors_use_objects_through_the_buckets_policy_alone(iam: Iam) -> None:
    judgement = iam.judgement(api="storage")
    assert call(judgement, "storage.v1:objects.get", bucket="b") is not None
    iam.policies.create("buckets/b", bucket_bindings())
    assert call(judgement, "storage.v1:objects.get", bucket="b") is None
    assert judgement.test(["storage.objects.get"], PROJECT_RESOURCE) == []
    iam.persona("roles/viewer")
    assert call(iam.judgement(api="storage"), "storage.v1:objects.get", bucket="b") is None
    assert call(iam.judgement(api="storage"), "storage.v1:objects.delete", bucket="b") is not None


def test_a_worker_has_the_roles_of_its_account(iam: Iam) -> None:
    worker = iam.judgement("7/0", "storage")
    assert call(worker, "storage.v1:objects.list", bucket="b") is not None
    iam.grant("buckets/b", f"serviceAccount:{RUNNER}", "roles/storage.objectAdmin")
    assert call(worker, "storage.v1:objects.list", bucket="b") is None
    assert call(worker, "storage.v1:buckets.get", bucket="b") is not None
    nobody = iam.judgement("8/0", "storage")
    assert call(nobody, "storage.v1:objects.list", bucket="b") is not None


def test_accounts_and_bindings(iam: Iam) -> None:
    iam.store.put("node", "m", {"id": "9", "serviceAccount": {"email": DEFAULT_ACCOUNT}})
    assert call(iam.judgement("9/0"), "tpu.v2:projects.locations.nodes.delete") is None, "it is an editor"
    binding = {"role": "roles/tpu.admin", "members": [f"serviceAccount:{RUNNER}"], "condition": {"title": "t"}}
    iam.policies.set(PROJECT_RESOURCE, {"version": 3, "bindings": [binding]}, conflict=409)
    get = "tpu.v2:projects.locations.nodes.get"
    assert call(iam.judgement("7/0"), get) is not None, "a binding with a condition gives nothing"
    reader = {"email": DEFAULT_ACCOUNT, "scope": ["https://www.googleapis.com/auth/devstorage.read_only"]}
    iam.store.put("node", "m", {"id": "9", "serviceAccount": reader})
    refusal = call(iam.judgement("9/0"), get)
    assert refusal is not None
    assert refusal.message == "Request had insufficient authentication scopes."
    assert refusal.details[0]["reason"] == "ACCESS_TOKEN_SCOPE_INSUFFICIENT"


def test_a_binding_takes_effect_late(iam: Iam, monkeypatch: pytest.MonkeyPatch) -> None:
    now = mock.Mock(return_value=1000.0)
    monkeypatch.setattr(policy_module.time, "time", now)
    iam.settings.update({"operation_seconds": 0.5})
    iam.grant(PROJECT_RESOURCE, f"serviceAccount:{RUNNER}", "roles/tpu.viewer")
    assert iam.policies.get(PROJECT_RESOURCE)["bindings"], "a read shows it at once"
    worker, get = iam.judgement("7/0"), "tpu.v2:projects.locations.nodes.get"
    assert call(worker, get) is not None
    takes = iam.settings.delay("role", PROJECT_RESOURCE)
    assert 1 <= takes <= 7, "a sixtieth of what it takes at Google"
    now.return_value = 999.9 + takes
    assert call(worker, get) is not None
    now.return_value = 1000.0 + takes
    assert call(worker, get) is None
    iam.grant(PROJECT_RESOURCE, f"serviceAccount:{RUNNER}", "roles/tpu.admin")
    assert call(worker, get) is None, "the former roles hold until the new ones do"
    assert call(worker, "tpu.v2:projects.locations.nodes.delete") is not None
    iam.settings.update({"realism": "relaxed"})
    iam.grant(PROJECT_RESOURCE, f"serviceAccount:{RUNNER}", "roles/tpu.admin")
    iam.settings.update({"realism": "strict"})
    assert call(worker, "tpu.v2:projects.locations.nodes.delete") is None


@pytest.mark.parametrize("resource", [PROJECT_RESOURCE, "buckets/b", f"{PROJECT_RESOURCE}/zones/z/instances/i"])
def test_conditions_are_shown_and_kept_by_version_3_alone(iam: Iam, resource: str) -> None:
    binding = {"role": "roles/tpu.admin", "members": ["user:you@example.com"], "condition": {"title": "t"}}
    with pytest.raises(ApiError, match="need policy version 3"):
        iam.policies.set(resource, {"bindings": [binding]}, conflict=409)
    iam.policies.set(resource, {"version": 3, "bindings": [binding]}, conflict=409)
    assert iam.policies.get(resource)["bindings"] == [binding]
    old = iam.policies.get(resource, 1)
    assert (old["version"], "condition" in old["bindings"][0]) == (1, False)
    assert old["bindings"][0]["role"].startswith("roles/tpu.admin_withcond_")
    with pytest.raises(ApiError, match=r"Role .*_withcond_.* is not supported"):
        iam.policies.set(resource, old, conflict=409)


@pytest.mark.parametrize("resource", [PROJECT_RESOURCE, "buckets/b", f"{PROJECT_RESOURCE}/serviceAccounts/other"])
def test_an_account_made_again_has_none_of_the_roles_of_the_deleted_one(iam: Iam, resource: str) -> None:
    iam.grant(resource, f"serviceAccount:{RUNNER}", "roles/tpu.admin")
    iam.policies.mark_deleted(RUNNER, "107")
    [binding] = iam.policies.get(resource)["bindings"]
    assert binding["members"] == [f"deleted:serviceAccount:{RUNNER}?uid=107"]
    iam.policies.set(resource, iam.policies.get(resource), conflict=409)  # as a client sends it back
    assert call(iam.judgement("7/0"), "tpu.v2:projects.locations.nodes.delete") is not None


def test_a_custom_role_contains_what_it_lists(iam: Iam) -> None:
    name = f"{PROJECT_RESOURCE}/roles/watchdog"
    with pytest.raises(ApiError, match=r"Role .*watchdog is not supported for this resource"):
        iam.grant(PROJECT_RESOURCE, f"serviceAccount:{RUNNER}", name)
    iam.store.put("role", name, {"includedPermissions": ["tpu.nodes.delete"]})
    iam.grant(PROJECT_RESOURCE, f"serviceAccount:{RUNNER}", name)
    worker = iam.judgement("7/0")
    assert call(worker, "tpu.v2:projects.locations.nodes.delete") is None
    assert call(worker, "tpu.v2:projects.locations.nodes.get") is not None
    iam.store.put("role", name, {"includedPermissions": ["tpu.nodes.delete"], "deleted": True})
    assert call(worker, "tpu.v2:projects.locations.nodes.delete") is not None


@pytest.mark.parametrize(
    ("roles", "project", "allowed"),
    [
        (["roles/owner"], "slipway-local", True),
        (["roles/tpu.admin"], "slipway-local", False),
        (["roles/tpu.admin", "roles/serviceusage.serviceUsageConsumer"], "slipway-local", True),
        (["roles/owner"], "of-someone-else", False),
    ],
)
def test_the_quota_project_must_be_one_that_the_caller_may_use(
    iam: Iam, roles: list[str], project: str, allowed: bool
) -> None:
    iam.persona(*roles)
    refusal = call(iam.judgement(), "tpu.v2:projects.locations.nodes.get", project)
    assert (refusal is None) == allowed
    assert refusal is None or refusal.details[0]["reason"] == "USER_PROJECT_DENIED"


def test_nothing_is_judged_when_relaxed(iam: Iam) -> None:
    iam.persona()
    assert call(iam.judgement(), "tpu.v2:projects.locations.nodes.get") is not None
    iam.settings.update({"realism": "relaxed"})
    assert call(iam.judgement(), "tpu.v2:projects.locations.nodes.get", "of-someone-else") is None
    assert iam.judgement().test(["tpu.nodes.create"], PROJECT_RESOURCE) == ["tpu.nodes.create"]


def test_a_fault_takes_one_permission_away(iam: Iam) -> None:
    import asyncio

    async def lose() -> None:
        iam.judge.faults.register("k", [{"kind": "denied", "permission": "tpu.nodes.get"}], None)

    asyncio.run(lose())
    assert call(iam.judgement(), "tpu.v2:projects.locations.nodes.get") is not None
    assert call(iam.judgement(), "tpu.v2:projects.locations.nodes.list") is None
    assert iam.judgement().test(["tpu.nodes.get", "tpu.nodes.list"], PROJECT_RESOURCE) == ["tpu.nodes.list"]

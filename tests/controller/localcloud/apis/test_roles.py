"""Custom roles, and what a VM may do whose account has one."""

from __future__ import annotations

from tests.controller.localcloud.harness import PROJECT, EmulatedCloud, wait_for

ROLES = f"iam/v1/{PROJECT}/roles"


def test_a_custom_role_is_made_changed_and_deleted(cloud: EmulatedCloud) -> None:
    body = {"roleId": "slipwayWatchdog", "role": {"title": "w", "includedPermissions": ["tpu.nodes.delete"]}}
    made = cloud.call_ok("POST", ROLES, body)
    assert made["name"] == f"{PROJECT}/roles/slipwayWatchdog"
    assert cloud.call("POST", ROLES, body)[0] == 409
    assert cloud.call("POST", ROLES, {"roleId": "no good"})[0] == 400
    more = {"includedPermissions": ["tpu.nodes.delete", "tpu.nodes.get"]}
    changed = cloud.call_ok("PATCH", f"{ROLES}/slipwayWatchdog?updateMask=includedPermissions", more)
    assert (changed["title"], len(changed["includedPermissions"])) == ("w", 2)
    assert [role["name"] for role in cloud.call_ok("GET", ROLES)["roles"]] == [made["name"]]
    assert cloud.call_ok("DELETE", f"{ROLES}/slipwayWatchdog")["deleted"]
    assert cloud.call_ok("GET", ROLES) == {}
    assert cloud.call("GET", f"{ROLES}/other")[0] == 404


def test_queued_resources_have_no_permissions_of_their_own(cloud: EmulatedCloud) -> None:
    role = {"includedPermissions": ["tpu.queuedresources.delete"]}
    status, answer = cloud.call("POST", ROLES, {"roleId": "queued", "role": role})
    assert (status, answer["error"]["message"]) == (400, "Permission tpu.queuedresources.delete is not valid.")


def test_a_caller_with_a_role_on_a_service_account_alone(cloud: EmulatedCloud) -> None:
    account = cloud.call_ok("POST", f"iam/v1/{PROJECT}/serviceAccounts", {"accountId": "single-account"})
    path = f"iam/v1/{account['name']}"
    wait_for(lambda: cloud.call("GET", path)[0] == 200, "the account is visible")
    owner = {"caller_roles": ["roles/owner"]}
    binding = {"role": "roles/iam.serviceAccountUser", "members": ["user:you@example.com"]}
    cloud.call_ok("POST", f"{path}:setIamPolicy", {"policy": {"bindings": [binding]}})
    cloud.call_ok("POST", "emulator/settings", {"caller_roles": []})
    wanted = {"permissions": ["iam.serviceAccounts.actAs", "iam.serviceAccounts.delete"]}
    held = wait_for(lambda: cloud.call_ok("POST", f"{path}:testIamPermissions", wanted).get("permissions"), "the role")
    on_project = cloud.call_ok("POST", f"cloudresourcemanager/v1/{PROJECT}:testIamPermissions", wanted)
    cloud.call_ok("POST", "emulator/settings", owner)
    assert (held, on_project) == (["iam.serviceAccounts.actAs"], {})

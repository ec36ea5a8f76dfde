"""Services that keep one collection each: custom roles (iam v1), secrets, budgets with billing, and OS Login.

https://cloud.google.com/iam/docs/creating-custom-roles, https://cloud.google.com/secret-manager/docs/reference/rest,
https://cloud.google.com/compute/docs/oslogin/rest/v1/users
"""

import base64
import hashlib
import re
import time
from dataclasses import dataclass
from typing import ClassVar

from conf.schema.cloud import all_permissions
from controller.localcloud.apis.service import Service
from controller.localcloud.http.call import (
    PROJECT,
    PROJECT_NUMBER,
    ApiCall,
    check_project,
    merge_patch,
    paginate,
    timestamp,
)
from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam import PROJECT_RESOURCE, format_etag
from controller.localcloud.store import Document
from controller.localcloud.vms.hosts import EMAIL, PROFILE_KIND, USER

_ROLE_ID = re.compile(r"[a-zA-Z0-9_.]{3,64}")
_SECRET_ID = re.compile(r"[A-Za-z0-9_-]{1,255}")
_SECRETS = f"projects/{PROJECT_NUMBER}/secrets"
BILLING_ACCOUNT = "012345-6789AB-CDEF01"
"""The only billing account."""


@dataclass(eq=False)
class CustomRoles(Service):
    """Roles, stored by full name, kind "role"."""

    methods: ClassVar = {"iam.v1:projects.roles.": "create get list patch delete"}

    def _create(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        role_id = call.body.get("roleId", "")
        if not _ROLE_ID.fullmatch(role_id):
            raise ApiError(400, f"The role ID {role_id!r} must match [a-zA-Z0-9_.]{{3,64}}")
        name = f"{PROJECT_RESOURCE}/roles/{role_id}"
        if self.store.get("role", name):
            raise ApiError(409, f"A role named {role_id} in {PROJECT_RESOURCE} already exists.")
        return self._save({"stage": "ALPHA", **call.body.get("role", {}), "name": name})

    def _save(self, role: Document) -> Document:
        for permission in role.get("includedPermissions", ()):
            if permission not in all_permissions():
                raise ApiError(400, f"Permission {permission} is not valid.")
        saved = {**role, "etag": format_etag(self.store.next_number("role"))}
        self.store.put("role", saved["name"], saved)
        return saved

    def _get(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        name = f"{PROJECT_RESOURCE}/roles/{call.path['rolesId']}"
        return self.store.require("role", name, f"The role named {name} was not found.")

    def _list(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        roles = [role for _, role in self.store.items("role") if not role.get("deleted") or call.flag("showDeleted")]
        return paginate(call, roles)

    def _patch(self, call: ApiCall) -> Document:
        role = self._get(call)
        return self._save({**merge_patch(role, call.masked_body()), "name": role["name"]})

    def _delete(self, call: ApiCall) -> Document:
        return self._save({**self._get(call), "deleted": True})  # it can be undeleted for seven days


@dataclass(eq=False)
class SecretManager(Service):
    """Secrets. Payloads of versions have the kind "secretPayload", which the state view omits."""

    methods: ClassVar = {"secretmanager.v1:projects.secrets.": "create get list delete addVersion versions.access"}

    def _create(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        secret = call.query.get("secretId", "")
        if not _SECRET_ID.fullmatch(secret):
            raise ApiError(400, f"Secret ID [{secret}] must match [a-zA-Z0-9_-]{{1,255}}.")
        if self.store.get("secret", secret):
            raise ApiError(409, f"Secret [{_SECRETS}/{secret}] already exists.")
        body = {
            "name": f"{_SECRETS}/{secret}",
            "replication": call.body.get("replication", {"automatic": {}}),
            "createTime": timestamp(time.time()),
            **({"labels": call.body["labels"]} if call.body.get("labels") else {}),
        }
        self.store.put("secret", secret, body)
        return body

    def _get(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        secret = call.path["secretsId"]
        return self.store.require("secret", secret, f"Secret [{_SECRETS}/{secret}] not found.")

    def _list(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        return paginate(call, [body for _, body in self.store.items("secret")])

    def _delete(self, call: ApiCall) -> Document:
        self._get(call)
        for name, _ in self._payloads(call):
            self.store.delete("secretPayload", name)
        self.store.delete("secret", call.path["secretsId"])
        return {}

    def _payloads(self, call: ApiCall) -> list[tuple[str, Document]]:
        return self.store.items("secretPayload", f"{call.path['secretsId']}/")

    def _add_version(self, call: ApiCall) -> Document:
        name = self._get(call)["name"]
        number = len(self._payloads(call)) + 1
        data = call.body.get("payload", {}).get("data", "")
        try:
            base64.b64decode(data, validate=True)
        except ValueError as error:
            raise ApiError(400, f"payload.data: {error}") from error
        self.store.put("secretPayload", f"{call.path['secretsId']}/{number:06d}", {"data": data})
        return {"name": f"{name}/versions/{number}", "state": "ENABLED"}

    def _versions_access(self, call: ApiCall) -> Document:
        name, version = self._get(call)["name"], call.path["versionsId"]
        stored = self._payloads(call)
        number = len(stored) if version == "latest" else int(version) if version.isdigit() else 0
        if not 1 <= number <= len(stored):
            raise ApiError(404, f"Secret Version [{name}/versions/{version}] not found.")
        return {"name": f"{name}/versions/{number}", "payload": {"data": stored[number - 1][1]["data"]}}


@dataclass(eq=False)
class Billing(Service):
    """Billing and the quotas of serviceusage. Budgets are stored by full name, kind "budget"."""

    methods: ClassVar = {
        "cloudbilling.v1:": "projects.getBillingInfo billingAccounts.list billingAccounts.testIamPermissions",
        "serviceusage.v1beta1:services.": "consumerQuotaMetrics.list",
        "billingbudgets.v1:billingAccounts.budgets.": "create get list patch delete",
    }

    def _billing_accounts_test_iam_permissions(self, call: ApiCall) -> Document:
        return call.test_permissions(self._parent(call))

    def _projects_get_billing_info(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        known = {"name": f"projects/{PROJECT}/billingInfo", "projectId": PROJECT}
        billed = {"billingAccountName": f"billingAccounts/{BILLING_ACCOUNT}", "billingEnabled": True}
        return known | ({} if self.faults.standing("billing_disabled") else billed)  # false and empty: left out

    def _billing_accounts_list(self, call: ApiCall) -> Document:
        account = {"name": f"billingAccounts/{BILLING_ACCOUNT}", "open": True, "displayName": "Emulated"}
        return paginate(call, [{**account, "masterBillingAccount": ""}])

    def _consumer_quota_metrics_list(self, call: ApiCall) -> Document:
        check_project(call.path["v1beta1Id1"])
        listed = {"tpu.googleapis.com": self.quotas.tpu_metrics, "compute.googleapis.com": self.quotas.pool_metrics}
        metrics = listed.get(call.path["servicesId"])
        return paginate(call, metrics()) if metrics else {}

    def _create(self, call: ApiCall) -> Document:
        parent = self._parent(call)
        if "amount" not in call.body:
            raise ApiError(400, "Budget amount is required.")
        name = f"{parent}/budgets/{self.store.next_number('budget'):08d}"
        budget = {**call.body, "name": name, "etag": "1"}
        self.store.put("budget", name, budget)
        return budget

    def _get(self, call: ApiCall) -> Document:
        name = f"{self._parent(call)}/budgets/{call.path['budgetsId']}"
        return self.store.require("budget", name, f"The resource '{name}' was not found")

    def _list(self, call: ApiCall) -> Document:
        return paginate(call, [budget for _, budget in self.store.items("budget", f"{self._parent(call)}/")])

    def _patch(self, call: ApiCall) -> Document:
        budget = self._get(call)
        changed = merge_patch(budget, call.masked_body())
        changed |= {"name": budget["name"], "etag": str(int(budget["etag"]) + 1)}
        self.store.put("budget", budget["name"], changed)
        return changed

    def _delete(self, call: ApiCall) -> Document:
        self.store.delete("budget", self._get(call)["name"])
        return {}

    def _parent(self, call: ApiCall) -> str:
        account = call.path["billingAccountsId"]
        if account != BILLING_ACCOUNT:
            raise ApiError(403, f"The caller does not have permission on billing account '{account}'")
        return f"billingAccounts/{account}"


@dataclass(eq=False)
class OsLogin(Service):
    """Login profile and user info of the only user."""

    methods: ClassVar = {
        "oauth2.v2:": "userinfo.get",
        "oslogin.v1:users.": "getLoginProfile importSshPublicKey",
    }

    def _userinfo_get(self, _: ApiCall) -> Document:
        return {"email": EMAIL, "verified_email": True}

    def _get_login_profile(self, call: ApiCall) -> Document:
        if (user := call.path["usersId"]) != EMAIL:
            raise ApiError(403, f"The caller is {EMAIL} and may not see the profile of {user}")
        return self.store.get(PROFILE_KIND, EMAIL) or {"name": EMAIL}

    def _import_ssh_public_key(self, call: ApiCall) -> Document:
        profile = {"sshPublicKeys": {}, **self._get_login_profile(call)}
        if "projectId" in call.query:
            check_project(call.query["projectId"])
        key = call.body.get("key", "").strip()
        if not key.startswith(("ssh-", "ecdsa-")):
            raise ApiError(400, "Invalid SSH public key")
        fingerprint = hashlib.sha256(key.encode()).hexdigest()
        entry = {"key": key, "fingerprint": fingerprint, "name": f"users/{EMAIL}/sshPublicKeys/{fingerprint}"}
        profile["sshPublicKeys"][fingerprint] = entry
        account = {"username": USER, "uid": "1234567890", "gid": "1234567890", "homeDirectory": f"/home/{USER}"}
        account |= {"primary": True, "operatingSystemType": "LINUX", "accountId": PROJECT}
        profile["posixAccounts"] = [{**account, "name": f"users/{EMAIL}/projects/{PROJECT}"}]
        self.store.put(PROFILE_KIND, EMAIL, profile)
        return {"loginProfile": profile}

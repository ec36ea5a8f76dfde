"""Projects: serviceusage v1, cloudresourcemanager v1 and v3, and iam v1, with enabled services and IAM policies."""

import re
import time
from collections import Counter
from typing import Any

from controller.localcloud.apis.operations import Operations, as_longrunning
from controller.localcloud.http.call import (
    DEFAULT_ACCOUNT,
    PROJECT,
    PROJECT_NUMBER,
    ApiCall,
    Handler,
    check_project,
    paginate,
)
from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam.policies import PROJECT_RESOURCE, Policies, format_etag, is_visible
from controller.localcloud.settings import Settings
from controller.localcloud.store import Document, Store

ENABLED_BY_DEFAULT = frozenset({"logging", "monitoring", "serviceusage", "storage"})
"""Those of our APIs that a new project has: https://cloud.google.com/service-usage/docs/enabled-service#default."""
_WITHOUT_SERVICE = frozenset({"oauth2", "serviceusage"})
"""oauth2 is no service of a project, and no project can do without serviceusage."""
_FLAPPING_OPERATIONS = 2.5
"""Counted from the request to enable it, whose own operation takes one."""


class EnabledApis:
    """States of the services (kind "service"), by names such as `tpu.googleapis.com`."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._refused = Counter[str]()

    def is_enabled(self, service: str) -> bool:
        from_the_start = not self._settings.is_strict or service.partition(".")[0] in ENABLED_BY_DEFAULT
        default = "ENABLED" if from_the_start else "DISABLED"
        return (self._store.get("service", service) or {"state": default})["state"] == "ENABLED"

    def set_enabled(self, service: str, enabled: bool) -> None:
        fresh = enabled and not self.is_enabled(service)
        former = self._store.get("service", service) or {}
        steady = time.time() + self._settings.delay(_FLAPPING_OPERATIONS) if fresh else former.get("steadyAt", 0.0)
        self._store.put("service", service, {"state": "ENABLED" if enabled else "DISABLED", "steadyAt": steady})

    def check(self, api: str) -> None:
        """Raise ApiError 403 for a disabled API. One just enabled refuses every other request: frontends differ."""
        service = f"{api}.googleapis.com"
        if api in _WITHOUT_SERVICE:
            return
        if self.is_enabled(service):
            if time.time() >= (self._store.get("service", service) or {}).get("steadyAt", 0.0):
                return
            self._refused[service] += 1
            if self._refused[service] % 2 == 0:
                return
        message = (
            f"{service} has not been used in project {PROJECT_NUMBER} before or it is disabled. Enable it by visiting "
            f"https://console.developers.google.com/apis/api/{service}/overview?project={PROJECT_NUMBER} then retry. "
            "If you enabled this API recently, wait a few minutes for the action to propagate to our systems and retry."
        )
        metadata = {"service": service, "consumer": f"projects/{PROJECT_NUMBER}"}
        info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "SERVICE_DISABLED"}
        info |= {"domain": "googleapis.com", "metadata": metadata}
        raise ApiError(403, message, reason="accessNotConfigured", details=[info])


_APIS = (
    "artifactregistry billingbudgets cloudbilling cloudresourcemanager compute iam iap logging monitoring "
    "oslogin secretmanager serviceusage storage tpu"
)
SERVICES = tuple(f"{api}.googleapis.com" for api in _APIS.split())
FIRST_ACCOUNT_ID = 107 * 10**18
"""As long as Google's, and none of the stand-ins that a recording of `witness` begins with."""
_ACCOUNT_ID = re.compile(r"[a-z]([-a-z0-9]{4,28}[a-z0-9])")


class Projects:
    def __init__(
        self, store: Store, operations: Operations, policies: Policies, settings: Settings, apis: EnabledApis
    ) -> None:
        self._store = store
        self._settings = settings
        self._apis = apis
        self._operations = operations
        self._policies = policies

    def handlers(self) -> dict[str, Handler]:
        usage = "serviceusage.v1:"
        table: dict[str, Handler] = {
            f"{usage}services.enable": lambda call: self._enable(call, [call.path["servicesId"]], "ENABLED"),
            f"{usage}services.disable": lambda call: self._enable(call, [call.path["servicesId"]], "DISABLED"),
            f"{usage}services.batchEnable": lambda call: self._enable(call, call.body.get("serviceIds", []), "ENABLED"),
            f"{usage}services.get": lambda call: self._service(_project(call), call.path["servicesId"]),
            f"{usage}services.batchGet": self._batch_get,
            f"{usage}services.list": self._list_services,
            f"{usage}operations.get": self._operation,
            "cloudresourcemanager.v1:projects.get": self._project_v1,
            "cloudresourcemanager.v3:projects.get": self._project_v3,
            "iam.v1:projects.serviceAccounts.create": self._create_account,
            "iam.v1:projects.serviceAccounts.get": self._account,
            "iam.v1:projects.serviceAccounts.list": self._list_accounts,
            "iam.v1:projects.serviceAccounts.delete": self._delete_account,
            "iam.v1:projects.serviceAccounts.getIamPolicy": lambda call: self._policies.get(
                self._account(call)["name"]
            ),
            "iam.v1:projects.serviceAccounts.setIamPolicy": self._set_account_policy,
            "iam.v1:projects.serviceAccounts.testIamPermissions": lambda call: call.test_permissions(
                self._account(call)["name"]
            ),
        }
        for version in ("v1", "v3"):
            table |= {
                f"cloudresourcemanager.{version}:projects.getIamPolicy": self._get_policy,
                f"cloudresourcemanager.{version}:projects.setIamPolicy": self._set_policy,
                f"cloudresourcemanager.{version}:projects.testIamPermissions": self._test_permissions,
            }
        return table

    def _service(self, project: str, name: str) -> Document:
        check_project(project)
        if name not in SERVICES:
            raise ApiError(403, f"Not found or permission denied for service(s): {name}.")
        return {
            "name": f"projects/{PROJECT_NUMBER}/services/{name}",
            "parent": f"projects/{PROJECT_NUMBER}",
            "config": {"name": name, "title": name.partition(".")[0]},
            "state": "ENABLED" if self._apis.is_enabled(name) else "DISABLED",
        }

    def _enable(self, call: ApiCall, names: list[str], state: str) -> Document:
        for name in names:
            self._service(_project(call), name)
        for name in names:
            self._apis.set_enabled(name, state == "ENABLED")
        verb = "enable" if state == "ENABLED" else "disable"
        operation = self._operations.begin(f"projects/{PROJECT}", verb, f"services/{','.join(names)}")
        return as_longrunning(operation, short_name=True)

    def _batch_get(self, call: ApiCall) -> Document:
        names = [name.rpartition("/")[2] for name in call.query.get("names", "").split(",") if name]
        return {"services": [self._service(_project(call), name) for name in names]}

    def _list_services(self, call: ApiCall) -> Document:
        services = [self._service(_project(call), name) for name in SERVICES]
        wanted = call.query.get("filter", "")
        if wanted:
            _, _, state = wanted.partition(":")
            if wanted not in ("state:ENABLED", "state:DISABLED"):
                raise ApiError(400, f"Invalid filter '{wanted}': state:ENABLED or state:DISABLED")
            services = [service for service in services if service["state"] == state]
        return paginate(call, services, "services")

    def _operation(self, call: ApiCall) -> Document:
        name = f"projects/{PROJECT}/operations/{call.path['operationsId']}"
        return as_longrunning(self._operations.get(name), short_name=True)

    def _project_v1(self, call: ApiCall) -> Document:
        check_project(call.path["projectId"])
        return {
            "projectId": PROJECT,
            "projectNumber": PROJECT_NUMBER,
            "name": PROJECT,
            "lifecycleState": "ACTIVE",
            "createTime": "2026-01-01T00:00:00.000Z",
        }

    def _project_v3(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        return {
            "name": f"projects/{PROJECT_NUMBER}",
            "projectId": PROJECT,
            "displayName": PROJECT,
            "state": "ACTIVE",
            "createTime": "2026-01-01T00:00:00.000Z",
        }

    def _get_policy(self, call: ApiCall) -> Document:
        check_project(_project(call))
        return self._policies.get(f"projects/{PROJECT}")

    def _set_policy(self, call: ApiCall) -> Document:
        check_project(_project(call))
        return self._policies.set(f"projects/{PROJECT}", call.body.get("policy", {}), conflict=409)

    def _test_permissions(self, call: ApiCall) -> Document:
        check_project(_project(call))
        return call.test_permissions(PROJECT_RESOURCE)

    def _create_account(self, call: ApiCall) -> Document:
        check_project(_project(call))
        account_id = call.body.get("accountId", "")
        if not _ACCOUNT_ID.fullmatch(account_id):
            raise ApiError(400, f"The account ID \"{account_id}\" must match '[a-z]([-a-z0-9]{{4,28}}[a-z0-9])'")
        email = f"{account_id}@{PROJECT}.iam.gserviceaccount.com"
        name = f"projects/{PROJECT}/serviceAccounts/{email}"
        if self._store.get("serviceAccount", email):
            raise ApiError(409, f"Service account {account_id} already exists within project projects/{PROJECT}.")
        account: dict[str, Any] = {
            **call.body.get("serviceAccount", {}),
            "name": name,
            "email": email,
            "projectId": PROJECT,
            "uniqueId": str(self._store.next_number("account", FIRST_ACCOUNT_ID)),
            "etag": format_etag(1),
        }
        self._store.put("serviceAccount", email, {**account, "visibleAt": time.time() + self._settings.delay(1)})
        return account

    def _accounts(self) -> dict[str, Document]:
        """Return the project's service accounts by address, including Compute's default account."""
        default: Document = {
            "name": f"projects/{PROJECT}/serviceAccounts/{DEFAULT_ACCOUNT}",
            "email": DEFAULT_ACCOUNT,
            "projectId": PROJECT,
            "uniqueId": PROJECT_NUMBER,
            "displayName": "Compute Engine default service account",
            "etag": format_etag(1),
        }
        shown = {email: account for email, account in self._store.items("serviceAccount") if is_visible(account)}
        return {DEFAULT_ACCOUNT: default} | {
            email: {key: value for key, value in account.items() if key != "visibleAt"}
            for email, account in shown.items()
        }

    def _account(self, call: ApiCall) -> Document:
        wildcard = _project(call) == "-"
        if not wildcard:
            check_project(_project(call))
        wanted = call.path["serviceAccountsId"]
        for email, account in self._accounts().items():
            if wanted in (email, account["uniqueId"]):
                return account
        if wildcard:  # as documented at projects.serviceAccounts.get
            message = f"Permission '{call.method.name}' denied on resource (or it may not exist)."
            raise ApiError(403, message)
        raise ApiError(404, f"Unknown service account: {wanted}")

    def _list_accounts(self, call: ApiCall) -> Document:
        check_project(_project(call))
        return paginate(call, list(self._accounts().values()), "accounts")

    def _set_account_policy(self, call: ApiCall) -> Document:
        return self._policies.set(self._account(call)["name"], call.body.get("policy", {}), conflict=409)

    def _delete_account(self, call: ApiCall) -> Document:
        self._store.delete("serviceAccount", self._account(call)["email"])
        return {}


def _project(call: ApiCall) -> str:
    """Return the project of a call; the discovery documents name that path parameter differently."""
    for name in ("projectsId", "projectId", "resource", "v1Id1"):
        if name in call.path:
            return call.path[name]
    raise ApiError(404, f"{call.method.name} names no project")

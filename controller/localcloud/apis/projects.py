"""Projects: serviceusage v1, cloudresourcemanager v1 and v3, and iam v1, with enabled services and IAM policies."""

import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from controller.localcloud.apis.operations import as_longrunning
from controller.localcloud.apis.service import Service
from controller.localcloud.faults.refusals import effective_policy
from controller.localcloud.http.call import (
    DEFAULT_ACCOUNT,
    PROJECT,
    PROJECT_NUMBER,
    ApiCall,
    Handler,
    check_project,
    paginate,
)
from controller.localcloud.http.errors import ApiError, error_info
from controller.localcloud.iam import PROJECT_RESOURCE, format_etag, is_visible
from controller.localcloud.settings import Settings
from controller.localcloud.store import Document, Store

ENABLED_BY_DEFAULT = frozenset({"logging", "monitoring", "serviceusage", "storage"})
"""Those of our APIs that a new project has: https://cloud.google.com/service-usage/docs/enabled-service#default."""
_WITHOUT_SERVICE = frozenset({"oauth2", "serviceusage"})
"""oauth2 is no service of a project, and no project can do without serviceusage."""
_APIS = (
    "artifactregistry billingbudgets cloudbilling cloudresourcemanager compute iam iap logging monitoring "
    "oslogin secretmanager serviceusage storage tpu"
)
_MOST_ENABLED, _MOST_READ = 20, 30
"""Services of one request: descriptions of services.batchEnable and services.batchGet."""
SERVICES = tuple(f"{api}.googleapis.com" for api in _APIS.split())
FIRST_ACCOUNT_ID = 107 * 10**18
"""As long as Google's, and none of the stand-ins that a recording of `witness` begins with."""
_ACCOUNT_ID = re.compile(r"[a-z]([-a-z0-9]{4,28}[a-z0-9])")


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
        times = self._store.get("service", service) or {"steadyAt": 0.0, "agentAt": 0.0}
        if fresh:
            now = time.time()
            times |= {"steadyAt": now + self._settings.delay("new API", service)}
            times |= {"agentAt": now + self._settings.delay("service agent", service)}
        self._store.put("service", service, {**times, "state": "ENABLED" if enabled else "DISABLED"})

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
        consumer = f"projects/{PROJECT_NUMBER}"
        info = error_info("SERVICE_DISABLED", "googleapis.com", service=service, consumer=consumer)
        raise ApiError(403, message, reason="accessNotConfigured", details=[info])


@dataclass(eq=False)
class Projects(Service):
    apis: EnabledApis
    methods: ClassVar = {
        "serviceusage.v1:": "services.batchGet services.list operations.get",
        "iam.v1:projects.serviceAccounts.": "create get list delete",
    }

    def handlers(self) -> dict[str, Handler]:
        usage, manager = "serviceusage.v1:services.", "cloudresourcemanager."
        return super().handlers() | {
            f"{usage}enable": lambda call: self._enable(call, [call.path["servicesId"]], True),
            f"{usage}disable": lambda call: self._enable(call, [call.path["servicesId"]], False),
            f"{usage}batchEnable": lambda call: self._enable(call, call.body.get("serviceIds", []), True),
            f"{usage}get": lambda call: self._service(call, call.path["servicesId"]),
            f"{manager}v1:projects.get": lambda call: _show_project(
                call, name=PROJECT, projectNumber=PROJECT_NUMBER, lifecycleState="ACTIVE"
            ),
            f"{manager}v3:projects.get": lambda call: _show_project(
                call, name=f"projects/{PROJECT_NUMBER}", displayName=PROJECT, state="ACTIVE"
            ),
            f"{manager}v1:projects.getEffectiveOrgPolicy": self._org_policy,
            "iap.v1:testIamPermissions": lambda call: call.test_permissions(_tunnels(call)),
            **self.of_policies(f"{manager}v1:projects.", _check_named),
            **self.of_policies(f"{manager}v3:projects.", _check_named),
            **self.of_policies("iam.v1:projects.serviceAccounts.", lambda call: self._get(call)["name"]),
        }

    def _org_policy(self, call: ApiCall) -> Document:
        """Return a constraint's effective policy."""
        _check_named(call)
        name = call.body.get("constraint", "")
        if not name.startswith("constraints/"):
            raise ApiError(400, "Request contains an invalid argument.")
        policy = effective_policy(name.removeprefix("constraints/"), self.faults.standing("policy"))
        return {"constraint": name, **policy}

    def _service(self, call: ApiCall, name: str) -> Document:
        _check_named(call)
        if name not in SERVICES:
            raise ApiError(403, f"Not found or permission denied for service(s): {name}.")
        return {
            "name": f"projects/{PROJECT_NUMBER}/services/{name}",
            "parent": f"projects/{PROJECT_NUMBER}",
            "config": {"name": name, "title": name.partition(".")[0]},
            "state": "ENABLED" if self.apis.is_enabled(name) else "DISABLED",
        }

    def _enable(self, call: ApiCall, names: list[str], enabled: bool) -> Document:
        if len(names) > _MOST_ENABLED:
            raise ApiError(400, f"A request can enable at most {_MOST_ENABLED} services.")
        states = {self._service(call, name)["state"] for name in names}
        if self.settings.is_strict and states <= {"ENABLED" if enabled else "DISABLED"}:
            return {"name": "operations/noop.DONE_OPERATION", "done": True, "response": {}}
        for name in names:
            self.apis.set_enabled(name, enabled)
        verb = "enable" if enabled else "disable"
        operation = self.operations.begin(verb, f"services/{','.join(names)}", parent=PROJECT_RESOURCE)
        return as_longrunning(operation, short_name=True)

    def _services_batch_get(self, call: ApiCall) -> Document:
        names = call.query.get("names", "").split(",")
        if len(names) > _MOST_READ:
            raise ApiError(400, f"A request can name at most {_MOST_READ} services.")
        return {"services": [self._service(call, name.rpartition("/")[2]) for name in names if name]}

    def _services_list(self, call: ApiCall) -> Document:
        services = [self._service(call, name) for name in SERVICES]
        if wanted := call.query.get("filter", ""):
            if wanted not in ("state:ENABLED", "state:DISABLED"):
                raise ApiError(400, f"Invalid filter '{wanted}': state:ENABLED or state:DISABLED")
            services = [service for service in services if service["state"] == wanted.partition(":")[2]]
        return paginate(call, services)

    def _operations_get(self, call: ApiCall) -> Document:
        name = f"{PROJECT_RESOURCE}/operations/{call.path['operationsId']}"
        return as_longrunning(self.operations.get(name), short_name=True)

    def _create(self, call: ApiCall) -> Document:
        _check_named(call)
        account_id = call.body.get("accountId", "")
        if not _ACCOUNT_ID.fullmatch(account_id):
            raise ApiError(400, f"The account ID \"{account_id}\" must match '[a-z]([-a-z0-9]{{4,28}}[a-z0-9])'")
        email = f"{account_id}@{PROJECT}.iam.gserviceaccount.com"
        if self.store.get("serviceAccount", email):
            raise ApiError(409, f"Service account {account_id} already exists within project {PROJECT_RESOURCE}.")
        number = str(self.store.next_number("account", FIRST_ACCOUNT_ID))
        account = {**call.body.get("serviceAccount", {}), **_identity(email, number)}
        visible = time.time() + self.settings.delay("service account", email)
        self.store.put("serviceAccount", email, {**account, "visibleAt": visible})
        return account

    def _accounts(self) -> dict[str, Document]:
        """Return the project's service accounts by address, including Compute's default account."""
        default = {
            **_identity(DEFAULT_ACCOUNT, PROJECT_NUMBER),
            "displayName": "Compute Engine default service account",
        }
        return {DEFAULT_ACCOUNT: default} | {
            email: {key: value for key, value in account.items() if key != "visibleAt"}
            for email, account in self.store.items("serviceAccount")
            if is_visible(account)
        }

    def _get(self, call: ApiCall) -> Document:
        wildcard = call.path["projectsId"] == "-"
        if not wildcard:
            _check_named(call)
        wanted = call.path["serviceAccountsId"]
        for email, account in self._accounts().items():
            if wanted in (email, account["uniqueId"]):
                return account
        if wildcard:  # as documented at projects.serviceAccounts.get
            raise ApiError(403, f"Permission '{call.method.name}' denied on resource (or it may not exist).")
        raise ApiError(404, f"Unknown service account: {wanted}")

    def _list(self, call: ApiCall) -> Document:
        _check_named(call)
        return paginate(call, list(self._accounts().values()))

    def _delete(self, call: ApiCall) -> Document:
        account = self._get(call)
        self.store.delete("serviceAccount", account["email"])
        self.policies.mark_deleted(account["email"], account["uniqueId"])
        return {}


def _show_project(call: ApiCall, **shown: str) -> Document:
    _check_named(call)
    return {"projectId": PROJECT, **shown, "createTime": "2026-01-01T00:00:00.000Z"}


def _identity(email: str, number: str) -> Document:
    name = f"{PROJECT_RESOURCE}/serviceAccounts/{email}"
    return {"name": name, "email": email, "projectId": PROJECT, "uniqueId": number, "etag": format_etag(1)}


def _tunnels(call: ApiCall) -> str:
    """Return the resource with the policy of IAP's tunnels in a zone."""
    project, _, tunnels = call.path["v1Id"].removeprefix("projects/").partition("/")
    check_project(project)
    if not re.fullmatch(r"iap_tunnel(/zones/[-a-z0-9]+)?", tunnels):
        raise ApiError(400, "Request contains an invalid argument.")
    return f"{PROJECT_RESOURCE}/{tunnels}"


def _check_named(call: ApiCall) -> str:
    """Return the project's resource; raise ApiError 403 for a call of another project, 404 for one of none.

    The discovery documents name that path parameter differently.
    """
    for name in ("projectsId", "projectId", "resource", "v1Id1"):
        if name in call.path:
            check_project(call.path[name])
            return PROJECT_RESOURCE
    raise ApiError(404, f"{call.method.name} names no project")

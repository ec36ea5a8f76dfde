"""Judges requests by the roles of their callers, the scopes of their tokens and their quota project."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from conf.schema.infra.permissions import has_method, permissions_of_method, permissions_of_role
from controller.localcloud.faults.faults import Faults
from controller.localcloud.http.call import PROJECT, PROJECT_NUMBER
from controller.localcloud.http.discovery import Method
from controller.localcloud.http.errors import permission_denied, scopes_insufficient, user_project_denied
from controller.localcloud.iam.callers import LAPTOP, Caller
from controller.localcloud.iam.policies import PROJECT_RESOURCE, Policies
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store

_BASIC_ROLES = {"roles/owner": "projectOwner", "roles/editor": "projectEditor", "roles/viewer": "projectViewer"}
_OF_PROJECT = ("buckets.insert", "buckets.list", "projects.serviceAccounts.create", "projects.serviceAccounts.list")
"""Methods that need a permission of the project, although they concern a kind of resource with policies of its own."""


@dataclass(frozen=True)
class Judge:
    """Decides who may do what. A binding with a condition gives nothing, since conditions are not evaluated."""

    store: Store
    policies: Policies
    settings: Settings
    faults: Faults

    def permissions(self, caller: Caller, resource: str) -> frozenset[str]:
        """Return what a caller holds on a resource: the roles there, and those in the project."""
        people = {caller.member, "allUsers", "allAuthenticatedUsers"}
        roles = {*caller.inherited, *self._bound(PROJECT_RESOURCE, people)}
        if resource != PROJECT_RESOURCE:
            people |= {f"{_BASIC_ROLES[role]}:{PROJECT}" for role in roles & _BASIC_ROLES.keys()}
            roles |= self._bound(resource, people)
        held = frozenset().union(*(self._contents(role) for role in roles))
        return held - self.faults.denied_permissions(caller.client == LAPTOP)

    def holds(self, caller: Caller, permission: str, resource: str) -> bool:
        return not self.settings.is_strict or permission in self.permissions(caller, resource)

    def _bound(self, resource: str, people: set[str]) -> set[str]:
        bindings = self.policies.effective_bindings(resource)
        return {b["role"] for b in bindings if not b.get("condition") and people & set(b["members"])}

    def _contents(self, role: str) -> frozenset[str]:
        if not role.startswith(f"{PROJECT_RESOURCE}/roles/"):
            return permissions_of_role(role)
        stored = self.store.get("role", role) or {}
        return frozenset(() if stored.get("deleted") else stored.get("includedPermissions", ()))


@dataclass
class Judgement:
    """Judgement of one request; `used` collects the permissions that it needed."""

    judge: Judge
    caller: Caller
    api: str
    used: list[str] = field(default_factory=list)

    def require(self, permission: str, resource: str) -> None:
        """Raise ApiError 403 unless the caller holds a permission on a resource."""
        self.used.append(permission)
        if not self.judge.holds(self.caller, permission, resource):
            raise permission_denied(self.api, permission, resource, self.caller.email)

    def test(self, permissions: list[str], resource: str) -> list[str]:
        """Return those of some permissions that the caller holds, as the testIamPermissions methods do."""
        return [permission for permission in permissions if self.judge.holds(self.caller, permission, resource)]

    def admit(self, method: Method, path: Mapping[str, str], quota_project: str | None) -> None:
        """Raise ApiError 403 unless the caller may call a method."""
        if not self.judge.settings.is_strict:
            return
        if method.scopes and not self.caller.scopes & set(method.scopes):
            raise scopes_insufficient(method.api, method.name)
        if quota_project is not None:
            self.used.append("serviceusage.services.use")
            own = quota_project in (PROJECT, PROJECT_NUMBER)
            if not own or not self.judge.holds(self.caller, "serviceusage.services.use", PROJECT_RESOURCE):
                raise user_project_denied(method.api, quota_project)
        if not has_method(method.api, method.name):
            return  # it is not implemented, which its answer says
        resource = _resource_of(method, path)
        if resource.startswith("buckets/") and self.judge.store.get("bucket", resource.partition("/")[2]) is None:
            return  # names of buckets are no secret: 404
        for permission in permissions_of_method(method.api, method.name):
            self.require(permission, resource)

    def hide_absent(self, method: Method, path: Mapping[str, str]) -> None:
        """Raise ApiError 403 for an absent object if the caller may not list objects, to whom 404 would reveal it."""
        resource = _resource_of(method, path)
        listed = method.name.startswith("objects.") and self.judge.store.get("bucket", resource.partition("/")[2])
        if listed and not self.judge.holds(self.caller, "storage.objects.list", resource):
            raise permission_denied(self.api, "storage.objects.list", resource, self.caller.email)


def _resource_of(method: Method, path: Mapping[str, str]) -> str:
    """Return the resource whose policy governs a call."""
    if method.name in _OF_PROJECT:
        return PROJECT_RESOURCE
    match method.api:
        case "storage":
            return f"buckets/{path.get('bucket') or path.get('destinationBucket') or ''}"
        case "iam" if "serviceAccountsId" in path:
            return f"{PROJECT_RESOURCE}/serviceAccounts/{path['serviceAccountsId']}"
        case "compute" if method.name.startswith("instances.") and ("instance" in path or "resource" in path):
            name = path.get("instance") or path["resource"]
            return f"{PROJECT_RESOURCE}/zones/{path['zone']}/instances/{name}"
        case "billingbudgets":
            return f"billingAccounts/{path.get('billingAccountsId', '')}"
    return PROJECT_RESOURCE

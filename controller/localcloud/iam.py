"""Who sends a request, and what they may do: callers, their access tokens, IAM policies, and the judgement of requests.

A caller is the user on the laptop, or the service account of a VM. An access token states who holds it and until when,
and is signed with the emulated cloud's own token. That one, in endpoint.json, stands for the user's refresh token, and
for tools that cannot refresh is a token that does not expire.

Policies are guarded by etags, and their changes take effect late. A request is judged by the roles of its caller, the
scopes of its token and its quota project.
"""

import base64
import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conf.schema.cloud import has_method, permissions_of_method, permissions_of_role
from controller.localcloud.faults.faults import Faults
from controller.localcloud.http import errors
from controller.localcloud.http.call import DEFAULT_ACCOUNT, PROJECT, PROJECT_NUMBER, ApiCall
from controller.localcloud.http.discovery import Method
from controller.localcloud.http.errors import ApiError, unauthenticated
from controller.localcloud.settings import Settings
from controller.localcloud.store import Document, Store
from controller.localcloud.vms.hosts import EMAIL, Vms

LAPTOP = "laptop"
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
USER_SCOPES = (
    "openid",
    "https://www.googleapis.com/auth/userinfo.email",
    CLOUD_PLATFORM,
    "https://www.googleapis.com/auth/sqlservice.login",
)
"""Scopes of `gcloud auth application-default login`."""


@dataclass(frozen=True)
class Caller:
    """Caller of a request.

    Attributes:
        client: "laptop", or "UID/INDEX" of the VM that sent it.
        email: address of the user or service account; "" for a VM without one.
        scopes: scopes of the token.
        inherited: roles that the caller has in the project without being named in its policy.
    """

    client: str
    email: str
    scopes: frozenset[str]
    inherited: tuple[str, ...] = ()

    @property
    def member(self) -> str:
        return f"{'user' if self.client == LAPTOP else 'serviceAccount'}:{self.email}"


EXPIRED_KIND, EXPIRED_NAME = "setting", "tokensExpired"
_PREFIX = "ya29"


class Tokens:
    def __init__(self, store: Store, settings: Settings, secret: str) -> None:
        self._store, self._settings, self._secret = store, settings, secret

    def issue(self, client: str) -> dict[str, Any]:
        """Return the answer of a token endpoint for a client: "laptop", or "UID/INDEX" of a VM."""
        lifetime = self._settings.token_seconds
        now = time.time()
        text = f"{_PREFIX}.{now * 1e6:.0f}.{(now + lifetime) * 1e6:.0f}.{client.replace('/', '_')}"
        return {"access_token": f"{text}.{self._sign(text)}", "expires_in": int(lifetime), "token_type": "Bearer"}

    def identify(self, token: str) -> str:
        """Return the client that holds a token. Raises ApiError 401 if it is unknown or has expired."""
        if are_equal(token, self._secret):
            return LAPTOP
        text, _, signature = token.rpartition(".")
        if not text.startswith(f"{_PREFIX}.") or not are_equal(signature, self._sign(text)):
            raise unauthenticated("ACCESS_TOKEN_TYPE_UNSUPPORTED")
        _, issued, until, client = text.split(".")
        ended = (self._store.get(EXPIRED_KIND, EXPIRED_NAME) or {"time": 0.0})["time"]
        if self._settings.is_strict and (time.time() * 1e6 >= int(until) or int(issued) <= ended * 1e6):
            raise unauthenticated()
        return client.replace("_", "/")

    def refresh(self, form: dict[str, str]) -> dict[str, Any]:
        """Answer the OAuth server's token endpoint: https://www.rfc-editor.org/rfc/rfc6749#section-6."""
        if form.get("grant_type") != "refresh_token":
            raise ApiError(400, "unsupported_grant_type")
        if not are_equal(form.get("refresh_token", ""), self._secret):
            raise ApiError(400, "invalid_grant")
        return {**self.issue(LAPTOP), "scope": " ".join(USER_SCOPES)}

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret.encode(), text.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()[:32]


def are_equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="surrogateescape"), other.encode(errors="surrogateescape"))


PROJECT_RESOURCE = f"projects/{PROJECT}"
_MEMBER = re.compile(
    r"(allUsers|allAuthenticatedUsers|(user|serviceAccount|group|domain|project(?:Owner|Editor|Viewer)|deleted:\w+):\S+)"
)


class Policies:
    """All policies by resource, kind "policy" in the store.

    The name of a resource is `projects/ID`, `buckets/NAME`, or the path of an instance or a service account.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings

    def get(self, resource: str, version: int = 3) -> Document:
        """Return the policy as last set, whether it is in effect yet or not.

        Whoever does not ask for version 3 sees no conditions, but roles with names that nobody can bind:
        https://cloud.google.com/iam/docs/troubleshooting-withcond.
        """
        stored = self._store.get("policy", resource) or {}
        bindings = stored.get("bindings", [])
        if version < 3:
            bindings = [_without_condition(binding) for binding in bindings]
        return {
            "version": min(stored.get("version", 1), version),
            "etag": stored.get("etag", format_etag(0)),
            "bindings": bindings,
        }

    def mark_deleted(self, email: str, uid: str) -> None:
        """Show a deleted account in all policies as such: another one of its name gets none of its roles.

        https://cloud.google.com/iam/docs/service-accounts-delete-undelete
        """
        member, deleted = f"serviceAccount:{email}", f"deleted:serviceAccount:{email}?uid={uid}"
        for resource, policy in self._store.items("policy"):
            for binding in (*policy["bindings"], *policy.get("former", ())):
                binding["members"] = [deleted if one == member else one for one in binding["members"]]
            self._store.put("policy", resource, policy)

    def effective_bindings(self, resource: str) -> list[Document]:
        stored = self._store.get("policy", resource) or {}
        return stored["former"] if time.time() < stored.get("effectiveAt", 0) else stored.get("bindings", [])

    def create(self, resource: str, bindings: list[Document]) -> None:
        """Give a new resource the policy that it has from the start."""
        etag = format_etag(self._store.next_number("policy"))
        self._store.put("policy", resource, {"version": 1, "etag": etag, "bindings": bindings})

    def set(self, resource: str, policy: Document, *, conflict: int) -> Document:
        """Replace the policy; raise ApiError `conflict` if its etag is not the current one."""
        current = self.get(resource)
        if policy.get("etag") not in (None, "", current["etag"]):
            retry = "Please retry the whole read-modify-write with exponential backoff."
            raise ApiError(conflict, f"There were concurrent policy changes. {retry}", status="ABORTED")
        bindings = [binding for binding in policy.get("bindings", ()) if binding.get("members")]
        has_conditions = any(binding.get("condition") for binding in bindings)
        if policy.get("version", 1) < 3 and has_conditions:
            raise ApiError(400, "Conditional role bindings need policy version 3.")
        for binding in bindings:
            role = binding.get("role", "")
            is_unknown = role.startswith(f"{PROJECT_RESOURCE}/roles/") and self._store.get("role", role) is None
            if _WITH_CONDITION in role or is_unknown:
                raise ApiError(400, f"Role {role} is not supported for this resource.")
            for member in binding["members"]:
                if not _MEMBER.fullmatch(member):
                    raise ApiError(400, f"Invalid value for member: {member}")
                kind, _, email = member.partition(":")
                own = kind == "serviceAccount" and email.endswith(f"@{PROJECT}.iam.gserviceaccount.com")
                if own and not is_visible(self._store.get("serviceAccount", email)):
                    raise ApiError(400, f"Service account {email} does not exist.")
        changed: dict[str, Any] = {
            "version": 3 if has_conditions else 1,
            "etag": format_etag(self._store.next_number("policy")),
            "bindings": bindings,
        }
        stored = changed
        if delay := self._settings.delay("role", resource):
            stored = {**changed, "former": self.effective_bindings(resource), "effectiveAt": time.time() + delay}
        self._store.put("policy", resource, stored)
        return changed


_WITH_CONDITION = "_withcond_"


def _without_condition(binding: Document) -> Document:
    if not binding.get("condition"):
        return binding
    digest = hashlib.sha256(repr(sorted(binding["condition"].items())).encode()).hexdigest()[:20]
    return {"role": f"{binding['role']}{_WITH_CONDITION}{digest}", "members": binding["members"]}


def requested_version(call: ApiCall) -> int:
    """Return the version of a policy that a call asks for; each API has another place for it."""
    in_body = call.body.get("options", {}).get("requestedPolicyVersion")
    in_query = call.query.get("options.requestedPolicyVersion") or call.query.get("optionsRequestedPolicyVersion")
    return int(in_body or in_query or 1)


def is_visible(account: Document | None) -> bool:
    """Return whether IAM shows an account; reads are eventually consistent after its creation."""
    return account is not None and time.time() >= account.get("visibleAt", 0)


def bucket_bindings() -> list[Document]:
    """Return the bindings of a new bucket: https://cloud.google.com/storage/docs/access-control/iam#convenience-values.

    Through these alone an Owner or Editor of the project may use the bucket's objects.
    """
    owners, readers = [f"projectEditor:{PROJECT}", f"projectOwner:{PROJECT}"], [f"projectViewer:{PROJECT}"]
    return [
        {"role": "roles/storage.legacyBucketOwner", "members": owners},
        {"role": "roles/storage.legacyBucketReader", "members": readers},
        {"role": "roles/storage.legacyObjectOwner", "members": owners},
        {"role": "roles/storage.legacyObjectReader", "members": readers},
    ]


def format_etag(number: int) -> str:
    return base64.b64encode(number.to_bytes(8, "big")).decode()


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

    def caller(self, client: str) -> Caller:
        if client == LAPTOP:
            return Caller(LAPTOP, EMAIL, frozenset(USER_SCOPES), self.settings.caller_roles)
        uid, _, index = client.partition("/")
        account = next((n["serviceAccount"] for _, n in self.store.items("node") if n["id"] == uid), None)
        if account is not None:  # https://cloud.google.com/tpu/docs/reference/rest/v2/ServiceAccount: none means all
            email, scopes = account["email"], account.get("scope") or [CLOUD_PLATFORM]
        else:
            instance = Vms(self.store).instance_of(uid, int(index or 0)) or {}
            accounts = instance.get("serviceAccounts") or [{"email": "", "scopes": []}]
            email, scopes = accounts[0]["email"], accounts[0].get("scopes", [])
        return Caller(client, email, frozenset(scopes), ("roles/editor",) if email == DEFAULT_ACCOUNT else ())

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
            raise errors.permission_denied(self.api, permission, resource, self.caller.email)

    def test(self, permissions: list[str], resource: str) -> list[str]:
        """Return those of some permissions that the caller holds, as the testIamPermissions methods do."""
        return [permission for permission in permissions if self.judge.holds(self.caller, permission, resource)]

    def admit(self, method: Method, path: Mapping[str, str], quota_project: str | None) -> None:
        """Raise ApiError 403 unless the caller may call a method."""
        if not self.judge.settings.is_strict:
            return
        if method.scopes and not self.caller.scopes & set(method.scopes):
            raise errors.scopes_insufficient(method.api, method.name)
        if quota_project is not None:
            self.used.append("serviceusage.services.use")
            own = quota_project in (PROJECT, PROJECT_NUMBER)
            if not own or not self.judge.holds(self.caller, "serviceusage.services.use", PROJECT_RESOURCE):
                raise errors.user_project_denied(method.api, quota_project)
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
            raise errors.permission_denied(self.api, "storage.objects.list", resource, self.caller.email)


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

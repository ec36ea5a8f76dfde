"""Access control of the emulated cloud: only local programs that know the token."""

import hmac
import ipaddress
import re
from dataclasses import dataclass

from aiohttp import web

from controller.localcloud.apis.projects import Policies
from controller.localcloud.http.call import PROJECT, PROJECT_NUMBER
from controller.localcloud.http.discovery import Method
from controller.localcloud.http.errors import ApiError
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from controller.localcloud.vms.machines import Instances

LAPTOP = "laptop"
IAP_CLIENT = "bot:iap-tunneler"
"""Origin header of Identity-Aware Proxy clients; no web page can send it."""


@dataclass(frozen=True)
class AdmittedRequest:
    """Admitted request. `path` lacks the prefix that carried the token; `base` is the root URL for this client."""

    client: str  # "laptop", or "UID/INDEX" of the worker that sent it
    path: str  # still percent-encoded, no leading slash
    root_url: str


def admit(request: web.Request, token: str, url: str) -> AdmittedRequest:
    """Check Host, Origin and the token, which is a Bearer token or part of the path.

    Paths: /t/TOKEN/... from the laptop, /w/TOKEN/UID/INDEX/... from a worker. The Host and Origin checks keep web
    pages out (DNS rebinding, cross-site requests). Raises ApiError 401 or 403.
    """
    host = request.headers.get("Host", "")
    if not _is_loopback(host):
        raise ApiError(403, f"Host {host!r} is not a loopback address")
    if request.headers.get("Origin", IAP_CLIENT) != IAP_CLIENT:
        raise ApiError(403, "Requests from web pages are refused")
    path = request.raw_path.partition("?")[0].lstrip("/")
    parts = path.split("/")
    if parts[0] == "t" and len(parts) > 2 and _tokens_equal(parts[1], token):
        return AdmittedRequest(LAPTOP, "/".join(parts[2:]), f"{url}t/{token}/")
    if parts[0] == "w" and len(parts) > 4 and _tokens_equal(parts[1], token):
        worker = f"{parts[2]}/{parts[3]}"
        return AdmittedRequest(worker, "/".join(parts[4:]), f"{url}w/{token}/{worker}/")
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    # The metadata server's tokens name the worker: TOKEN.UID.INDEX
    secret, _, worker = bearer.strip().partition(".")
    if scheme.lower() == "bearer" and _tokens_equal(secret, token):
        return AdmittedRequest(worker.replace(".", "/") or LAPTOP, path, url)
    raise ApiError(401, "Request is missing a valid token (endpoint.json in the state folder holds it)")


def _is_loopback(host: str) -> bool:
    """Return whether a host, with or without a port, is loopback. Anyone can own a name such as 127.example.com."""
    name = re.sub(r":\d*$", "", host)
    try:
        return name == "localhost" or ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _tokens_equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


_SUFFICIENT_ROLES = frozenset({"roles/owner", "roles/editor", "roles/tpu.admin"})


class Permissions:
    """Checks calls that change TPUs or delete instances; the contents of custom roles are not checked."""

    def __init__(self, store: Store, policies: Policies, machines: Instances, settings: Settings) -> None:
        self._settings = settings
        self._machines = machines
        self._store = store
        self._policies = policies

    def check(self, method: Method, client: str) -> None:
        """Raise ApiError 403 if the account of a VM, `UID/INDEX`, has no role that allows the call."""
        if client == LAPTOP or method.http == "GET" or not self._settings.is_strict:
            return
        if method.key == "compute.v1:instances.delete":
            self._check_deletion(client.partition("/")[0])
        if method.api != "tpu":
            return
        uid = client.partition("/")[0]
        nodes = (n["serviceAccount"]["email"] for _, n in self._store.items("node") if n["id"] == uid)
        email = self._machines.service_account(uid) or next(nodes, "")
        if email == f"{PROJECT_NUMBER}-compute@developer.gserviceaccount.com":
            return  # an editor in most projects
        bindings = self._policies.get(f"projects/{PROJECT}")["bindings"]
        roles = {b["role"] for b in bindings if f"serviceAccount:{email}" in b.get("members", ())}
        if not any(role in _SUFFICIENT_ROLES or role.startswith(f"projects/{PROJECT}/roles/") for role in roles):
            permission = f"{method.api}.{method.name.replace('projects.locations.', '').lower()}"
            raise ApiError(403, f"Permission '{permission}' denied on resource (or it may not exist).")

    def _check_deletion(self, uid: str) -> None:
        """Raise ApiError 403 unless the instance's own IAM policy lets its account delete it."""
        instance = self._machines.find(uid)
        bindings = self._policies.get(instance["path"])["bindings"] if instance else []
        member = f"serviceAccount:{self._machines.service_account(uid)}"
        roles = {b["role"] for b in bindings if member in b.get("members", ())}
        if "roles/compute.instanceAdmin.v1" not in roles:
            raise ApiError(403, "Required 'compute.instances.delete' permission for the instance")

"""Permissions of VM service accounts on TPUs. The only user, on the laptop, may do everything."""

from controller.localcloud.apis.projects import Policies
from controller.localcloud.http.admission import LAPTOP
from controller.localcloud.http.call import PROJECT, PROJECT_NUMBER
from controller.localcloud.http.discovery import Method
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Store
from controller.localcloud.vms.machines import Instances

_SUFFICIENT_ROLES = frozenset({"roles/owner", "roles/editor", "roles/tpu.admin"})


class Permissions:
    """Checks calls that change TPUs or delete instances; the contents of custom roles are not checked."""

    def __init__(self, store: Store, policies: Policies, machines: Instances) -> None:
        self._machines = machines
        self._store = store
        self._policies = policies

    def check(self, method: Method, client: str) -> None:
        """Raise ApiError 403 if the account of a VM, `UID/INDEX`, has no role that allows the call."""
        if client == LAPTOP or method.http == "GET":
            return
        if method.key == "compute.v1:instances.delete":
            self._check_deletion(client.partition("/")[0])
        if method.api != "tpu":
            return
        uid = client.partition("/")[0]
        nodes = (n["serviceAccount"]["email"] for _, n in self._store.items("node") if n["id"] == uid)
        email = self._machines.account(uid) or next(nodes, "")
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
        member = f"serviceAccount:{self._machines.account(uid)}"
        roles = {b["role"] for b in bindings if member in b.get("members", ())}
        if "roles/compute.instanceAdmin.v1" not in roles:
            raise ApiError(403, "Required 'compute.instances.delete' permission for the instance")

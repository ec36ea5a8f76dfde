"""What a worker's service account may do to TPUs. The one user there is, on the laptop, may do everything."""

from __future__ import annotations

from controller.localcloud.admission import LAPTOP
from controller.localcloud.call import PROJECT, PROJECT_NUMBER
from controller.localcloud.discovery import Method
from controller.localcloud.errors import CloudError
from controller.localcloud.projects import Policies
from controller.localcloud.store import Store

_ENOUGH = frozenset({"roles/owner", "roles/editor", "roles/tpu.admin"})


class Permissions:
    """Judged for calls of the TPU API that change something; what a custom role holds is not looked at."""

    def __init__(self, store: Store, policies: Policies) -> None:
        self._store = store
        self._policies = policies

    def check(self, method: Method, client: str) -> None:
        """CloudError 403 for a worker, `UID/INDEX`, whose account has no role that allows this."""
        if client == LAPTOP or method.api != "tpu" or method.http == "GET":
            return
        uid = client.partition("/")[0]
        email = next((n["serviceAccount"]["email"] for _, n in self._store.items("node") if n["id"] == uid), "")
        if email == f"{PROJECT_NUMBER}-compute@developer.gserviceaccount.com":
            return  # an editor in most projects
        bindings = self._policies.get(f"projects/{PROJECT}")["bindings"]
        roles = {b["role"] for b in bindings if f"serviceAccount:{email}" in b.get("members", ())}
        if not any(role in _ENOUGH or role.startswith(f"projects/{PROJECT}/roles/") for role in roles):
            permission = f"{method.api}.{method.name.replace('projects.locations.', '').lower()}"
            raise CloudError(403, f"Permission '{permission}' denied on resource (or it may not exist).")

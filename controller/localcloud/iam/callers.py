"""Who sends a request: the user on the laptop, or the service account of a VM, with the scopes of its token."""

from dataclasses import dataclass

from controller.localcloud.apis.oslogin import EMAIL
from controller.localcloud.http.call import PROJECT_NUMBER
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from controller.localcloud.vms.hosts import Vms
from controller.localcloud.vms.machines import Instances

LAPTOP = "laptop"
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
USER_SCOPES = (
    "openid",
    "https://www.googleapis.com/auth/userinfo.email",
    CLOUD_PLATFORM,
    "https://www.googleapis.com/auth/sqlservice.login",
)
"""Scopes of `gcloud auth application-default login`."""
DEFAULT_ACCOUNT = f"{PROJECT_NUMBER}-compute@developer.gserviceaccount.com"
"""Compute Engine's default account, an editor of most projects."""


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


class Callers:
    """Finds the caller of a client."""

    def __init__(self, store: Store, machines: Instances, settings: Settings) -> None:
        self._store, self._machines, self._settings = store, machines, settings

    def find(self, client: str) -> Caller:
        if client == LAPTOP:
            return Caller(LAPTOP, EMAIL, frozenset(USER_SCOPES), self._settings.caller_roles)
        uid, _, index = client.partition("/")
        account = next((n["serviceAccount"] for _, n in self._store.items("node") if n["id"] == uid), None)
        if account is not None:  # https://cloud.google.com/tpu/docs/reference/rest/v2/ServiceAccount: none means all
            email, scopes = account["email"], account.get("scope") or [CLOUD_PLATFORM]
        elif instance := Vms(self._store).instance_of(uid, int(index or 0)):
            accounts = instance.get("serviceAccounts") or [{"email": "", "scopes": []}]
            email, scopes = accounts[0]["email"], accounts[0].get("scopes", [])
        else:
            email, scopes = self._machines.service_account(uid), self._machines.scopes(uid)
        return Caller(client, email, frozenset(scopes), ("roles/editor",) if email == DEFAULT_ACCOUNT else ())
